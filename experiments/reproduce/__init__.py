"""Tables and figures of the paper, one file each: ``ifcomp reproduce NAME``."""

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

#: Every study by its name, in the order of the page of claims.
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

#: Where results go unless said otherwise.
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def reproduce(
    name: str, preset: str, results: Path = RESULTS, *, plot_only: bool = False, progress: bool | None = None
) -> dict[str, str]:
    """Run a study or go on with it, and write its table, its plot and the page of claims.

    Scratch files of a run that was killed are removed. Only one process at a time works on a result.

    Args:
        name: One of `STUDIES`.
        preset: One of the study's.
        results: Folder of all results.
        plot_only: Make table, plot and claims from the result file, and run nothing.
        progress: Show a progress bar; None shows it on terminals.

    Returns:
        The files that were written, with what is in them.
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
        found = record.read(folder) if plot_only else record.run(study, preset, folder, progress=progress)
        missing = record.unfinished(study, found)
        if missing:
            raise StorageError(
                f"'{name}', {preset}, is not finished: {', '.join(missing)}. Run without --plot-only first."
            )
        written = {str(folder / record.FILE): "all numbers, settings and versions"}
        written |= publish.publish(study, found, folder)
    return written | {str(publish.write_claims(STUDIES, results)): "the paper's claims beside what we find"}
