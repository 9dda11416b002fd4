"""The layers, one file for each kind: the functions that describe a network of them.

=========================  =======================================================================
combinator                 what it does to features f, of width C
=========================  =======================================================================
``dense``, ``conv``        ``sqrt(c_w / fan_in) W f + sqrt(c_b) b``, W and b standard normal
``act``                    ``sum_i w_i s_i(f)``, elementwise
``average_pool``           mean over each window;  ``global_average_pool``: over all positions
``flatten``                all positions into one vector, for ``dense``
``serial``                 one after another; the identity if there is none
``add``                    ``sum_k w_k branch_k(f)``, each branch with weights of its own
``residual``               ``branch(f) + skip shortcut(f)``, an ``add`` of two
=========================  =======================================================================

``fan_in`` is C times the size of the window. **Where a weight stands, a name may**: then it is an
entry of ``alpha``, which the kernel and the finite network take; equal names share their value.
"""
