"""Attacks on every public function and command, for ``benchmarks/reliability/reliability.py``.

=====================  ===========================================================================
``case``               one generated input, how it is attacked, and what came of it
``bad``                what may be wrong with an argument, by its kind
``registry``           the generators by public name; which public names have none
``hypergradients``     inverses, lower solvers, hypergradients
``solver_options``     how these are made, and what people write in their place
``searching``          search, descent
``simplices``          geometries of alpha, discrete choices
``mixtures``           spectral estimators, linear models, stability
``theorems``           ``bilevel.bounds``: coverings, and what is proved here
``papers``             ``bilevel.bounds``: the papers' theorems
``eigenvalue_bounds``  ``ntk.bounds``
``kernels``            ``ntk``: infinite and finite kernels
``eigenvalues``        ``ntk``: eigenvalues, certificates, regression
``train_free``         ``ntk.scores``
``selection``          baselines, data, checkpoints, pictures
``architectures``      search spaces
``feature_maps``       spaces of feature maps
``commands``           command lines
``crashes``            kills, bit flips, a full disk, two writers; ``victims``: of what
``nonfinite``          NaN at every quantity of a search
``records``            results as lines of JSON, the table
=====================  ===========================================================================
"""
