"""The parts of ``benchmarks/reliability.py``: attacks on every public function and command.

=====================  ===========================================================================
``case``               one generated input, how it is attacked, and what came of it
``bad``                what may be wrong with an argument, by its kind
``registry``           the generators by public name; which public names have none
``hypergradients``     problems, lower solvers, inverses, hypergradients, search
``simplices``          geometries of alpha, discrete choices
``mixtures``           spectral estimators, linear models, stability
``theorems``           ``bilevel.bounds``
``eigenvalue_bounds``  ``ntk.bounds``
``kernels``            ``ntk``
``train_free``         ``ntk.scores``
``selection``          baselines, data, checkpoints, pictures
``architectures``      search spaces
``feature_maps``       spaces of feature maps
``commands``           command lines
``crashes``            kills, bit flips, a full disk, two writers
``nonfinite``          NaN at every quantity of a search
``records``            results as lines of JSON, the table
=====================  ===========================================================================
"""
