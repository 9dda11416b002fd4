"""Convolutional networks of neural-tangents: their kernels certified, and one of them chosen.

    bilevel certify --kernel stax_kernels:cnns --data cifar10 --pixels 8 --rows 60  # here
    python stax_kernels.py

Three infinitely wide networks classify CIFAR-10 images of 8 x 8 pixels, animals against vehicles. A
search learns the mixture of their kernels and the ridge penalty on validation rows. At every step
the smallest eigenvalue of the mixture is certified.
"""

import jax
import jax.numpy as jnp
import optax

import bilevel
import ntk
from bilevel.nets import unit_images
from bilevel.spaces import kernel_mixture_space

TRAIN, VALID = 60, 60
ANIMALS = jnp.array([2, 3, 4, 5, 6, 7])  # labels of CIFAR-10


def cnns():
    """Return kernel functions of images [n, h, w, c] by name."""
    stax = ntk.neural_tangents().stax

    def cnn(activation, *last):
        convolution = stax.Conv(1, (3, 3), padding="SAME", W_std=2**0.5)
        kernel_fn = stax.serial(convolution, activation, *last, stax.Dense(1))[2]
        # It is faster when compiled as a whole. Also, one float64 convolution that is compiled
        # alone, for 60 images, makes jaxlib 0.10.2 read beyond the end of an array, which crashes
        # on some processors.
        return jax.jit(lambda x1, x2=None: kernel_fn(x1, x2, "ntk"))

    return {
        "relu": cnn(stax.Relu(), stax.Flatten()),
        "erf": cnn(stax.Erf(), stax.Flatten()),
        "relu, pooled": cnn(stax.Relu(), stax.GlobalAvgPool()),
    }


def rows():
    """Return training and validation batches of images and labels +-1."""
    sizes = {"train": TRAIN, "valid": VALID, "test": 1}
    (parts,) = bilevel.data.draw_splits("cifar10", [jax.random.key(0)], **sizes)
    (x, labels), (xv, labels_v), _ = parts
    x, xv = unit_images(x, xv, pixels=8)
    signs = [jnp.where(jnp.isin(y, ANIMALS), 1.0, -1.0) for y in (labels, labels_v)]
    return (x, signs[0]), (xv, signs[1])


def main():
    """Certify the kernels, search, and print the results."""
    (x, y), (xv, yv) = rows()
    kernels = cnns()
    worst = ntk.certify_simplex(list(kernels.values()), x=x)
    print(f"no mixture has a smaller eigenvalue than {worst.lower:.4f}")

    space = kernel_mixture_space(kernels, outer="logistic")
    train, valid = (space.inputs(x), y), (space.inputs(xv, x), yv)
    mixture = optax.chain(bilevel.tangent(), optax.adam(0.1), bilevel.exponentiate())
    optimizer = optax.partition(
        {"mixture": mixture, "log_penalty": optax.adam(0.1)},
        {"mixture": "mixture", "log_penalty": "log_penalty"},
    )
    start = space.start(), space.init(jax.random.key(0), train)
    result = bilevel.search(
        space.problem, space.solver, optimizer, *start, train, valid, steps=60, progress=False
    )
    bounds = space.certificates(result.history["alpha"], x)
    losses = result.history["value"]
    for step in (0, 29, 59):
        print(
            f"step {step + 1}: loss {losses[step]:.4f}, smallest eigenvalue >= {bounds[step]:.4f}"
        )
    weights = zip(space.names, result.alpha["mixture"].tolist(), strict=True)
    print("found:", ", ".join(f"{weight:.2f} {name}" for name, weight in weights))
    return worst, result, bounds


if __name__ == "__main__":
    main()
