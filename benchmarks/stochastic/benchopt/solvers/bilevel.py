"""The single-loop methods of the package bilevel, for benchopt/benchmark_bilevel."""

from benchmark_utils.stochastic_jax_solver import StochasticJaxSolver
from benchopt import safe_import_context

with safe_import_context() as import_ctx:
    import jax
    import jax.numpy as jnp
    import optax

    import bilevel as package

STEPS = 2**20  # that a run may take; benchopt ends it before


class Solver(StochasticJaxSolver):
    """SABA or SPABA; without a step size, steps come from measured curvature."""

    name = "bilevel"
    requirements = ("jax", "jaxlib", "optax")
    parameters = {  # noqa: RUF012 (benchopt's form)
        "method": ["saba", "spaba"],
        "step_size": [None],
        "outer_ratio": [1.0],
        "batch_size": [64],
        **StochasticJaxSolver.parameters,
    }

    def set_objective(
        self, f_inner, f_outer, n_inner_samples, n_outer_samples, inner_var0, outer_var0
    ):
        def over_rows(loss):
            """A batch is the numbers of its rows, which lie side by side."""
            return lambda w, alpha, rows: loss(w, alpha, start=rows[0], batch_size=len(rows))

        self.problem = package.Problem(over_rows(f_inner), over_rows(f_outer))
        self.rows = jnp.arange(n_inner_samples), jnp.arange(n_outer_samples)
        self.inner_var0, self.outer_var0 = inner_var0, outer_var0
        self.run(iter([True, False]).__next__)  # a warm-up: the program is compiled here

    def run(self, callback):
        self.inner_var, self.outer_var = self.inner_var0, self.outer_var0
        method = getattr(package, self.method)
        if self.step_size is None:
            solver, optimizer = method(), package.paced()
        else:
            rate = self.step_size / self.outer_ratio
            solver, optimizer = method(self.step_size), optax.sgd(rate)

        def told(result):
            self.inner_var, self.outer_var = result.w, result.alpha
            return not callback()

        if not callback():
            return
        package.search(
            *(self.problem, solver, optimizer, self.outer_var0, self.inner_var0, *self.rows),
            steps=STEPS,
            batches=package.partition(self.batch_size),
            key=jax.random.key(self.random_state),
            callback=told,
            every=self.eval_freq,
            chunk=self.eval_freq,
            history=(),
            progress=False,
        )

    def init(self):
        """The search begins by itself."""

    def get_step(self, inner_sampler, outer_sampler):
        """The search steps by itself."""
