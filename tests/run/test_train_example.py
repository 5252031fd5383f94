"""``examples/train_gpt.py``, as its users run it: launcher, torchrun, alone; stopped and continued."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

import paceline
from paceline.run.init import World

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
SIZES = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 4, "dropout": 0.1, "lr": 0.02, "sample": 0}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
ENVIRON = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def run(*command: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=ENVIRON, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def paceline_train(*flags: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    return run("-m", "paceline", "train", *SMALL, *flags, code=code)


def losses(out: Path) -> list[float]:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    return [entry["loss"] for entry in entries]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load(SCRIPT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 30 steps on two ranks without interruption: where it is, and what it wrote."""
    out = tmp_path_factory.mktemp("whole")
    return out, paceline_train("--steps", "30", "--out", out).stdout


def test_the_loss_falls_and_a_table_tells_the_rest(whole: tuple[Path, str], example: ModuleType) -> None:
    out, said = whole
    values = losses(out)
    assert len(values) == 30
    assert sum(values[-5:]) / 5 < values[0] - 1.5
    assert "step 20/30  loss" in said, "without a terminal there are plain lines"
    assert "\x1b" not in said
    rows = {
        cells[1].strip(): cells[2].strip() for cells in (line.split("│") for line in said.splitlines()) if cells[1:]
    }
    assert rows["steps"] == "1 to 30"
    assert rows["loss"] == f"{values[0]:.3f} -> {values[-1]:.3f}"
    assert int(rows["buckets"]) >= 1
    config = example.Config(**{name: SIZES[name] for name in ("layers", "width", "heads", "context")})
    parameters = sum(parameter.numel() for parameter in example.GPT(config).parameters())
    assert int(rows["bytes a step"].replace(",", "")) >= 4 * parameters
    assert float(rows["tokens/s"].replace(",", "")) > 0
    assert "ms a step" in rows["exposed communication"]
    assert (out / "checkpoint.safetensors").is_file()


@pytest.mark.full
def test_resume_continues_with_the_losses_of_an_uninterrupted_run(whole: tuple[Path, str], tmp_path: Path) -> None:
    flags = ("--steps", "30", "--out", tmp_path)
    first = paceline_train(*flags, "--stop-at", "13")
    assert "--resume continues it" in first.stdout
    assert losses(tmp_path) == losses(whole[0])[:13]
    second = paceline_train(*flags, "--resume")
    assert "continuing after step 13" in second.stdout
    assert losses(tmp_path) == losses(whole[0])
    assert list(tmp_path.glob("*.partial")) == []


@pytest.mark.full
def test_torchrun_runs_the_same_script_to_the_same_losses(whole: tuple[Path, str], tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    run(*torchrun, SCRIPT, *SMALL, "--steps", "30", "--stop-at", "5", "--out", tmp_path)
    assert losses(tmp_path) == losses(whole[0])[:5]


@pytest.mark.full
def test_it_runs_alone(tmp_path: Path) -> None:
    done = run(SCRIPT, *SMALL, "--steps", "2", "--out", tmp_path, "--sample", "20")
    assert "1 rank, from scratch" in done.stdout
    assert "What it writes now:\nOn a " in done.stdout
    assert len(losses(tmp_path)) == 2


def test_a_finished_run_is_extended_by_more_steps_only(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    world = paceline.init(device="cpu")
    try:
        for steps, resume in ((2, False), (2, True), (3, True)):
            flags = [*SMALL, "--steps", str(steps), "--out", str(tmp_path), *(["--resume"] if resume else [])]
            assert example.train(*example.parse_flags(flags), world) == 0
    finally:
        paceline.shutdown()
    said = capsys.readouterr().out
    assert said.count("Nothing to do up to step 2") == 1
    assert said.count("continuing after step 2") == 1
    assert len(losses(tmp_path)) == 3
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is of 2 steps, and this run would replace it. Give --resume"),
        ("not mine", "is not a checkpoint of this script"),
    ],
)
def test_a_checkpoint_is_not_replaced_without_asking(
    content: str | None, said: str, example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint.safetensors"
    flags = [*SMALL, "--out", str(tmp_path), "--steps"]
    world = paceline.init(device="cpu")
    try:
        if content is None:
            assert example.train(*example.parse_flags([*flags, "2"]), world) == 0
        else:
            checkpoint.write_text(content, encoding="utf-8")
        before = checkpoint.read_bytes()
        # More steps would be no excuse: a Ctrl-C may end them after the first.
        for steps in ("1", "3"):
            with pytest.raises(SystemExit) as ended:
                example.train(*example.parse_flags([*flags, steps]), world)
            assert ended.value.code == 2
            assert said in capsys.readouterr().err
            assert checkpoint.read_bytes() == before
        assert content or len(losses(tmp_path)) == 2
        assert example.train(*example.parse_flags([*flags, "1", "--overwrite"]), world) == 0
        assert len(losses(tmp_path)) == 1
    finally:
        paceline.shutdown()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 64}, "was made with --width 32; give the same here\n"),
        ({"seed": 7}, "was made with --seed 1; give the same here\n"),
        ({"world_size": 3}, "is of 2 ranks; start as many\n"),
        ({"path": Path("no/such.safetensors")}, "there is no"),
        ({"path": SCRIPT}, "is not a checkpoint of this script"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    change: dict[str, Any],
    said: str,
    whole: tuple[Path, str],
    example: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = SIZES | {"world_size": 2, "path": whole[0] / "checkpoint.safetensors"} | change
    world_size, path = sizes.pop("world_size"), sizes.pop("path")
    del sizes["sample"]
    config = example.Config(**sizes)
    model = example.GPT(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    world = World(rank=0, local_rank=0, world_size=world_size, device=torch.device("cpu"), backend="gloo")
    with pytest.raises(SystemExit) as ended:
        example.Checkpoint(path, world).load(config, model, torch.optim.AdamW(model.parameters()))
    assert ended.value.code == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_ctrl_c_on_a_terminal_saves_and_ends_all_ranks(tmp_path: Path) -> None:
    flags = [*SMALL, "--steps", "1000000", "--out", str(tmp_path)]
    controller, terminal = pty.openpty()
    mark = f"PACELINE_TEST_MARK={tmp_path}"
    environ = ENVIRON | {"TERM": "xterm", "PACELINE_TEST_MARK": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *flags], env=environ, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    try:
        while b"comm wait" not in shown:
            shown += os.read(controller, 65536)
        assert len(_marked(mark)) == 3, "a launcher and two ranks"
        process.send_signal(signal.SIGINT)
        # Reading fails when the last process that has the terminal open is gone.
        with contextlib.suppress(OSError):
            while chunk := os.read(controller, 65536):
                shown += chunk
        assert process.wait(timeout=60) == 130
        assert _marked(mark) == []
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    text = shown.decode()
    assert "tokens/s" in text
    assert "Stopped by SIGINT. The same command with --resume continues it." in text
    assert "Traceback" not in text
    with safe_open(tmp_path / "checkpoint.safetensors", "pt") as checkpoint:
        assert json.loads(checkpoint.metadata()["about"])["step"] == len(losses(tmp_path))


def _marked(mark: str) -> list[int]:
    """The processes that were given a variable."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended while we looked, or is not ours
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@pytest.mark.full
def test_a_wrong_flag_is_one_line_from_all_ranks_together(tmp_path: Path) -> None:
    done = paceline_train("--out", tmp_path, "--stepz", "3", code=2)
    assert done.stderr == "train_gpt: unrecognized arguments: --stepz 3 (see --help)\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--steps", "0"], "argument --steps: must be above 0, got 0"),
        (["--lr", "-1"], "argument --lr: must be above 0, got -1.0"),
        (["--lr", "nan"], "argument --lr: must be above 0, got nan"),
        (["--seed", "-1"], "argument --seed: must not be negative, got -1"),
        (["--heads", "3", "--width", "32"], "argument --heads: 3 does not divide --width 32"),
        (["--dropout", "1"], "argument --dropout: must be below 1, got 1.0"),
        (["--steps", "3", "--stop-at", "4"], "argument --stop-at: 4 is beyond --steps 3"),
        (["--resume", "--overwrite"], "argument --overwrite: not with --resume"),
        (["--text", "no/such.txt"], "argument --text: there is no file 'no/such.txt'"),
        (["--out", str(SCRIPT)], "argument --out: "),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(
    flags: list[str],
    said: str,
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        example.parse_flags(flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train_gpt: {said}")
    assert error.count("\n") == 1


def test_the_model_does_not_look_ahead(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.GPT(example.Config(width=32, layers=2, context=8)).eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] += 1
    before, after = model(tokens), model(changed.clamp(max=255))
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_the_learning_rate_warms_up_and_falls(example: ModuleType) -> None:
    config = example.Config(steps=100, lr=1.0)
    rates = [example.learning_rate(step, config) for step in range(100)]
    assert max(rates) == 1.0
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


def test_the_text_is_what_its_generator_writes() -> None:
    generator = load(EXAMPLES / "data" / "make_rides.py")
    assert generator.make_text() == (EXAMPLES / "data" / "rides.txt").read_text(encoding="ascii")
