"""Differentiable bilevel optimization in JAX."""

from bilevel._hypergradient import HyperGradient, hypergradient
from bilevel.estimate import Info
from bilevel.inverse import cg, dense, gram, neumann, nystrom, scale
from bilevel.problem import Problem
from bilevel.protocols import LowerSolver
from bilevel.solvers import implicit, lbfgs, newton, ridge, solved, unrolled
from bilevel._search import DescentState, NonFiniteError, SearchResult, descent, search
from bilevel.geometry import exponentiate, project, softmax, tangent
