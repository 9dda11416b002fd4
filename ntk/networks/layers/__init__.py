"""The layers, one file for each kind: the functions that describe a network of them.

=========================  =======================================================================
combinator                 effect on features f, of width C
=========================  =======================================================================
``dense``, ``conv``        ``sqrt(c_w / fan_in) W f + sqrt(c_b) b``, W and b standard normal
``act``                    ``sum_i w_i s_i(f)``, elementwise
``average_pool``           mean over each window;  ``global_average_pool``: over all positions
``flatten``                all positions into one vector, for ``dense``
``serial``                 one after another; ``serial()`` is the identity
``add``                    ``sum_k w_k branch_k(f)``, each branch with separate weights
``residual``               ``branch(f) + skip shortcut(f)``, an ``add`` of two
=========================  =======================================================================

``fan_in`` is C times the size of the window. **A name may replace any weight.** The name is then an
entry of ``alpha``, an argument of the kernel and of the finite network. Equal names share their
value.
"""
