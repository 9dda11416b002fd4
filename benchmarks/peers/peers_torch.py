"""The gallery's labels, penalties and schedules in PyTorch, for ``peers.py``.

Each problem has a function of the data drawn by `peers.py`. It returns ``alpha -> hypergradient``,
by hand or with TorchOpt. "By hand" is the algorithm of `higher`: parameters are passed as values,
and gradients keep their graph. Inputs and outputs are numpy arrays.
"""

import dataclasses

import numpy as np
import torch
import torchopt
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


def tensors(arrays):
    """Convert arrays to tensors, with integers in PyTorch's type for labels."""
    wide = (np.array(a, np.int64 if np.issubdtype(a.dtype, np.integer) else None) for a in arrays)
    return [torch.from_numpy(a) for a in wide]


def gradient_in(value_of, alpha):
    """Differentiate ``value_of(alpha)`` for an alpha of one array."""
    alpha = torch.from_numpy(np.array(alpha)).requires_grad_()
    return torch.autograd.grad(value_of(alpha), alpha)[0].numpy()


# ----------------------------------------------------------------------------- labels


class Network(nn.Module):
    """The network of examples/label_cleaning.py, without its dropout."""

    def __init__(self, w):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(16)])
        self.last = nn.Linear(7 * 7 * 16, 10)
        params = w["params"]
        with torch.no_grad():
            for i, conv in enumerate(self.convs):
                kernel = np.array(params[f"Conv_{i}"]["kernel"]).transpose(3, 2, 0, 1)
                conv.weight.copy_(torch.from_numpy(np.ascontiguousarray(kernel)))
                conv.bias.zero_()
            self.last.weight.copy_(torch.from_numpy(np.array(params["Dense_0"]["kernel"]).T))
            self.last.bias.zero_()

    def forward(self, x):
        x = x.permute(0, 3, 1, 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.functional.max_pool2d(nn.functional.relu(norm(conv(x))), 2)
        return self.last(x.permute(0, 2, 3, 1).flatten(1))


def weighted(alpha, outputs, batch):
    losses = cross_entropy(outputs, batch[1], reduction="none")
    return (torch.sigmoid(alpha[batch[2]]) * losses).mean()


def momentum_step(loss, params, trace, rate, momentum):
    """Return parameters and trace after a step of SGD, through which gradients flow."""
    slopes = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    trace = {k: momentum * trace[k] + g for k, g in zip(params, slopes, strict=True)}
    return {k: v - rate * trace[k] for k, v in params.items()}, trace


def labels_by_hand(w, batches, clean, rate, momentum):
    batches, clean = list(map(tensors, batches)), tensors(clean)

    def value(alpha):
        net, call = Network(w), torch.func.functional_call
        params = dict(net.named_parameters())
        trace = {k: torch.zeros_like(v) for k, v in params.items()}
        for batch in batches:
            loss = weighted(alpha, call(net, params, batch[0]), batch)
            params, trace = momentum_step(loss, params, trace, rate, momentum)
        net.eval()
        return cross_entropy(call(net, params, clean[0]), clean[1])

    return lambda alpha: gradient_in(value, alpha)


def labels_torchopt(w, batches, clean, rate, momentum):
    batches, clean = list(map(tensors, batches)), tensors(clean)

    def value(alpha):
        net = Network(w)
        optimizer = torchopt.MetaSGD(net, lr=rate, momentum=momentum)
        for batch in batches:
            optimizer.step(weighted(alpha, net(batch[0]), batch))
        net.eval()
        return cross_entropy(net(clean[0]), clean[1])

    return lambda alpha: gradient_in(value, alpha)


# ----------------------------------------------------------------------------- penalties


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A sparse matrix and its transpose. functorch does not convert this record."""

    x: torch.Tensor
    transpose: torch.Tensor


class Product(torch.autograd.Function):
    """The product of a matrix and a vector. It is twice differentiable, also by functorch."""

    @staticmethod
    def forward(v, matrix):
        return matrix.x @ v

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.back = Matrix(inputs[1].transpose, inputs[1].x)

    @staticmethod
    def backward(ctx, g):
        return Product.apply(g, ctx.back), None


def sparse(batch):
    """Convert JAX's sparse matrix and the labels."""
    at, values = (torch.from_numpy(np.array(a)) for a in (batch[0].indices, batch[0].data))
    x = torch.sparse_coo_tensor(at.T.long(), values, batch[0].shape)
    return Matrix(x.to_sparse_csr(), x.t().to_sparse_csr()), torch.from_numpy(np.array(batch[1]))


def logistic(words, shift, batch):
    x, y = batch
    return nn.functional.softplus(-y * (Product.apply(words, x) + shift)).mean()


def penalised(words, shift, alpha, batch):
    return logistic(words, shift, batch) + 0.5 * (alpha.exp() * words**2).sum()


def solved(alpha, batch):
    """Return the weights, by PyTorch's L-BFGS from 0."""
    w = [torch.zeros(len(alpha)).requires_grad_(), torch.zeros(()).requires_grad_()]
    options = {"max_iter": 200, "tolerance_grad": 1e-6, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(w, history_size=10, **options)

    def closure():
        optimizer.zero_grad()
        loss = penalised(*w, alpha, batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    return [x.detach() for x in w]


def conjugate_gradients(product, b, tol):
    """Return ``x`` with ``product(x) = b``; both are lists of tensors."""

    def dot(u, v):
        return sum((a * b).sum() for a, b in zip(u, v, strict=True))

    x, r = [torch.zeros_like(a) for a in b], [a.clone() for a in b]
    p, size, first = r, dot(r, r), dot(b, b)
    for _ in range(1000):
        if size <= tol**2 * first:
            break
        Ap = product(p)
        step = size / dot(p, Ap)
        x = [a + step * d for a, d in zip(x, p, strict=True)]
        r = [a - step * d for a, d in zip(r, Ap, strict=True)]
        last, size = size, dot(r, r)
        p = [a + size / last * d for a, d in zip(r, p, strict=True)]
    return x


def penalties_by_hand(train, valid, tol):
    train, valid = sparse(train), sparse(valid)

    def gradient(alpha):
        alpha = torch.from_numpy(np.array(alpha))
        w = [x.requires_grad_() for x in solved(alpha, train)]
        alpha.requires_grad_()
        right = torch.autograd.grad(logistic(*w, valid), w)
        slopes = torch.autograd.grad(penalised(*w, alpha, train), w, create_graph=True)

        def product(v):
            return torch.autograd.grad(slopes, w, v, retain_graph=True)

        adjoint = conjugate_gradients(product, right, tol)
        return -torch.autograd.grad(slopes, alpha, adjoint)[0].numpy()

    return gradient


def penalties_torchopt(train, valid, tol):
    train, valid = sparse(train), sparse(valid)

    def slope(w, alpha):
        return torch.func.grad(lambda w: penalised(*w, alpha, train))(w)

    solver = torchopt.linear_solve.solve_cg(rtol=tol, atol=0.0, maxiter=1000)

    @torchopt.diff.implicit.custom_root(slope, argnums=1, solve=solver)
    def solution(w, alpha):
        return tuple(solved(alpha.detach(), train))

    def value(alpha):
        return logistic(*solution((torch.zeros(len(alpha)), torch.zeros(())), alpha), valid)

    return lambda alpha: gradient_in(value, alpha)


# ----------------------------------------------------------------------------- schedules


class Steps:
    """Shared code of the two ways through the schedule's steps."""

    def __init__(self, w, batches, valid, knots):
        self.w, self.batches, self.valid = w, list(map(tensors, batches)), tensors(valid)
        place = np.linspace(0, knots - 1, len(batches))
        self.left = np.minimum(place.astype(int), knots - 2)
        self.share = torch.from_numpy((place - self.left).astype(np.float32))

    def rates(self, alpha):
        """Return every step's rate. ``alpha``: log rates at the knots, and the momentum's logit."""
        return torch.exp((1 - self.share) * alpha[self.left] + self.share * alpha[self.left + 1])

    def start(self):
        return {k: torch.from_numpy(np.array(v)).requires_grad_() for k, v in self.w.items()}

    def loss(self, w, batch):
        hidden = torch.tanh(batch[0] @ w["in"] + w["bias"])
        return cross_entropy(hidden @ w["out"], batch[1])


def schedules_by_hand(*given):
    steps = Steps(*given)

    def value(alpha):
        momentum, now = torch.sigmoid(alpha[-1]), steps.start()
        trace = {k: torch.zeros_like(v) for k, v in now.items()}
        for rate, batch in zip(steps.rates(alpha), steps.batches, strict=True):
            now, trace = momentum_step(steps.loss(now, batch), now, trace, rate, momentum)
        return steps.loss(now, steps.valid)

    return lambda alpha: gradient_in(value, alpha)


def schedules_torchopt(*given):
    steps = Steps(*given)

    def value(alpha):
        rates, now = steps.rates(alpha), steps.start()
        # The rates are a schedule of one optimizer, because a new optimizer resets the momentum.
        rule = torchopt.sgd(lr=lambda count: rates[int(count)], momentum=torch.sigmoid(alpha[-1]))
        state = rule.init(now)
        for batch in steps.batches:
            loss = steps.loss(now, batch)
            slopes = torch.autograd.grad(loss, list(now.values()), create_graph=True)
            updates, state = rule.update(dict(zip(now, slopes, strict=True)), state, inplace=False)
            now = torchopt.apply_updates(now, updates, inplace=False)
        return steps.loss(now, steps.valid)

    return lambda alpha: gradient_in(value, alpha)
