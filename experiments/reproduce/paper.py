"""The paper's own numbers, as printed in its tables and figures."""

#: Table of OOD detection: AUROC near and far in percent.
OOD = {
    "mnist": {
        "MSP": (91.45, 98.51),
        "ODIN": (92.38, 99.02),
        "Energy": (90.77, 98.77),
        "MLS": (92.49, 99.08),
        "KNN": (96.52, 96.66),
        "GradNorm": (76.55, 96.39),
        "RMDS": (98.00, 98.12),
        "VIM": (94.63, 98.99),
        "Gram": (73.90, 99.75),
        "IF-COMP": (99.40, 99.97),
    },
    "cifar10": {
        "MSP": (88.03, 90.73),
        "ODIN": (82.87, 87.96),
        "Energy": (87.58, 91.21),
        "MLS": (87.52, 91.10),
        "KNN": (90.64, 92.96),
        "GradNorm": (54.90, 57.55),
        "RMDS": (89.80, 92.20),
        "VIM": (88.68, 93.48),
        "Gram": (58.66, 71.73),
        "IF-COMP": (92.23, 95.63),
    },
}
