"""Test accuracies on NAS-Bench-201 printed in the papers."""

import math

_NAN = math.nan
PRINTED = {
    # Zhu et al. (2022), Table 2, with their note that the figures of NASWOT, TE-NAS and KNAS are
    # from those papers.
    "ResNet": ((93.97, _NAN), (70.86, _NAN), (42.63, _NAN)),
    "NAS-RL": ((92.83, _NAN), (70.71, _NAN), (44.10, _NAN)),
    "DARTS": ((88.32, _NAN), (67.34, _NAN), (33.04, _NAN)),
    "NASWOT": ((92.96, _NAN), (70.03, _NAN), (44.43, _NAN)),
    "TE-NAS": ((93.90, _NAN), (71.24, _NAN), (42.38, _NAN)),
    "KNAS (k=20), in Zhu et al.": ((93.38, _NAN), (70.78, _NAN), (44.63, _NAN)),
    "NASI (T)": ((93.08, 0.24), (69.51, 0.59), (40.87, 0.85)),
    "NASI (4T)": ((93.55, 0.10), (71.20, 0.14), (44.84, 1.41)),
    "Eigen-NAS (k=20)": ((93.46, 0.01), (71.42, 0.63), (45.54, 0.04)),
    "Eigen-NAS (k=5)": ((93.43, 0.08), (69.92, 1.82), (45.53, 0.06)),
    # Xu et al. (2021), whose figures for k = 20 are not those cited above.
    "KNAS (k=20)": ((93.05, _NAN), (68.91, _NAN), (34.11, _NAN)),
    "KNAS (k=40)": ((93.43, _NAN), (71.05, _NAN), (45.05, _NAN)),
}
"""Printed test accuracies: (mean, standard deviation) of each of ``DATASETS``, NaN if not given."""
