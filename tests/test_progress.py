"""The time left is shown however long a batch takes."""

import pytest

from ifcomp.progress import track


@pytest.mark.parametrize(("seconds", "left"), [(2.0, "0:00:14"), (90.0, "0:10:30")])
def test_time_left(
    seconds: float, left: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    items = track(list(range(10)), "working", show=True)
    for item in items:
        now += seconds
        if item == 3:
            break
    items.close()  # type: ignore[attr-defined]
    assert f"3/10 {'0:00:08' if seconds == 2 else '0:06:00'} left {left}" in capsys.readouterr().err
