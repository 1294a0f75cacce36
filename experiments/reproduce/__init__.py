"""Tables and figures of the paper, one module per study: ``ifcomp reproduce NAME``."""

from __future__ import annotations

from pathlib import Path

from experiments.reproduce import (
    ablation,
    calibration,
    components,
    mislabel,
    ood,
    oracle,
    pruning,
    publish,
    record,
    reliability,
    retraining,
    timing,
)
from experiments.reproduce.study import Study
from experiments.torchvision_shim import declare_missing_operators
from ifcomp.errors import SettingError, StorageError
from ifcomp.io.files import file_lock, remove_scratch_files

#: Studies by name, in the order of the page of claims.
STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        oracle,
        calibration,
        reliability,
        mislabel,
        components,
        ood,
        retraining,
        pruning,
        ablation,
        timing,
    )
}

#: Default folder of the results.
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def reproduce(
    name: str, preset: str, results: Path = RESULTS, *, plot_only: bool = False, progress: bool | None = None
) -> dict[str, str]:
    """Run or resume a study, and write its table, its plot and the page of claims.

    For presets whose name starts with "cifar10", the duration of each step is printed before it starts, if the
    repository has a result with durations. Scratch files of an interrupted run are removed. A lock ensures that one
    process at a time works on a result.

    Args:
        name: Name of the study, one of `STUDIES`.
        preset: Preset of the study.
        results: Folder of all results.
        plot_only: Write table, plot and claims from the result file without running anything.
        progress: Show a progress bar; None shows it on terminals.

    Returns:
        Descriptions of the written files by path.
    """
    if name not in STUDIES:
        raise SettingError(f"There is no study '{name}'. Choose one of {', '.join(STUDIES)}.")
    declare_missing_operators()
    study, folder = STUDIES[name], results / name / preset
    record.check_preset(study, preset)
    results.mkdir(parents=True, exist_ok=True)
    with file_lock(results / f"{name}-{preset}"):
        for file in (record.FILE, *publish.FILES) if folder.exists() else ():
            remove_scratch_files(folder / file)
        expected: dict[str, float] = {}
        if preset.startswith("cifar10"):
            expected |= study.durations(study.presets[preset])
            expected |= record.recorded_seconds(RESULTS / name / preset)
        if plot_only:
            result = record.read(folder)
        else:
            result = record.run(study, preset, folder, expected=expected, progress=progress)
        missing = record.unfinished(study, result)
        if missing:
            raise StorageError(
                f"'{name}', {preset}, is not finished: {', '.join(missing)}. Run without --plot-only first."
            )
        written = {str(folder / record.FILE): "all numbers, settings and versions"}
        written |= publish.publish(study, result, folder)
    return written | {str(publish.write_claims(STUDIES, results)): "claims of the paper and our results"}
