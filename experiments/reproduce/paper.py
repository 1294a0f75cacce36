"""Published numbers of the paper, from its tables and figures."""

#: OOD table: near and far AUROC in percent.
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

#: Further rows of OpenOOD v1.5 for CIFAR-10 and ResNet-18: near and far AUROC in percent.
OPENOOD = {"cifar10": {"NAC": (90.9, 94.6), "fDBD": (90.4, 93.2), "ASH": (75.3, 78.5)}}

#: Mislabel table: AUROC in percent, CIFAR-10.
MISLABEL = {
    "human": {"TracIn": 90.50, "EL2N": 73.38, "GraNd": 70.53, "Self-IF": 95.38, "IF-COMP": 96.86},
    "data-dependent": {"TracIn": 49.13, "EL2N": 52.18, "GraNd": 51.30, "Self-IF": 55.77, "IF-COMP": 88.07},
    "asymmetric": {"TracIn": 70.98, "EL2N": 51.53, "GraNd": 50.48, "Self-IF": 87.30, "IF-COMP": 95.69},
    "symmetric": {"TracIn": 64.40, "EL2N": 51.61, "GraNd": 50.52, "Self-IF": 43.16, "IF-COMP": 97.83},
}

#: Component figure at epoch 200: AUROC of error, sum, and complexity by beta.
COMPONENTS_END = {"error": 0.620, "IF-COMP": 0.810, 1.0: 0.648, 0.5: 0.707, 0.1: 0.788, 0.001: 0.820}

#: Pruning figure, CIFAR-10: test accuracy in percent by fraction.
PRUNING = {
    "EL2N": {0.1: 95.40, 0.2: 95.24, 0.3: 95.31, 0.4: 95.08, 0.5: 95.17, 0.6: 94.31, 0.7: 91.62},
    "GraNd": {0.1: 95.26, 0.2: 95.19, 0.3: 95.21, 0.4: 95.25, 0.5: 94.94, 0.6: 94.43, 0.7: 91.64},
    "TracIn": {0.1: 95.14, 0.2: 95.20, 0.3: 95.23, 0.4: 95.00, 0.5: 94.99, 0.6: 94.16, 0.7: 90.79},
    "IF-COMP": {0.1: 95.22, 0.2: 95.30, 0.3: 95.13, 0.4: 95.18, 0.5: 94.86, 0.6: 93.73, 0.7: 91.30},
    "Self-IF": {0.1: 94.75, 0.2: 94.68, 0.3: 94.47, 0.4: 94.02, 0.5: 93.55, 0.6: 92.70, 0.7: 91.35},
    "random": {0.1: 95.08, 0.2: 94.72, 0.3: 94.24, 0.4: 93.75, 0.5: 93.29, 0.6: 92.42, 0.7: 91.11},
}

#: ECE figure: medians over the corruptions of CIFAR-10-C at severities 1 to 5.
ECE = {
    "MC dropout": (0.020, 0.038, 0.069, 0.111, 0.185),
    "SWAG-D": (0.019, 0.038, 0.058, 0.080, 0.145),
    "SWA + temperature": (0.017, 0.030, 0.050, 0.069, 0.151),
    "ACNML + SWAG-D": (0.023, 0.027, 0.033, 0.040, 0.085),
    "ensemble": (0.008, 0.012, 0.021, 0.043, 0.099),
    "IF-COMP": (0.019, 0.018, 0.018, 0.019, 0.055),
}

#: Tuned alpha, and median ECE at severities 1 to 5 for each alpha of the ablation.
PAPER_ALPHA = 0.15
ECE_ALPHA = {
    0.0: (0.017, 0.030, 0.050, 0.069, 0.151),
    0.05: (0.008, 0.013, 0.025, 0.043, 0.112),
    0.1: (0.013, 0.015, 0.015, 0.022, 0.080),
    0.15: (0.019, 0.018, 0.018, 0.019, 0.055),
    0.3: (0.029, 0.033, 0.033, 0.038, 0.038),
    0.5: (0.035, 0.037, 0.040, 0.049, 0.042),
    1.0: (0.043, 0.046, 0.051, 0.054, 0.054),
}

#: pNML validation figure: Pearson's R on CIFAR-10, CIFAR-100, MNIST and all.
ORACLE = {
    "GradNorm": (0.569, 0.796, 0.190, 0.631),
    "Self-IF": (0.346, 0.743, 0.120, 0.455),
    "ACNML-EKFAC": (0.836, 0.818, 0.344, 0.839),
    "IF-COMP": (0.928, 0.888, 0.406, 0.871),
}
