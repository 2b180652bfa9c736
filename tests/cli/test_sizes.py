"""`polyhead sizes`: parameter counts of built models, FLOPs and cache derived from them, and the printed table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polyhead
from polyhead.cli.main import main
from polyhead.cli.sizes import count_model_sizes, format_count, rounds_to_published
from polyhead.models import bert

COUNTS = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "bert-tiny": 4_385_920,
    "bert-mini": 11_170_560,
    "bert-small": 28_763_648,
    "bert-medium": 41_373_184,
    "bert-minilm-l12": 33_360_000,
    "bert-minilm-l6": 22_713_216,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
    "gpt3": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "tinyllama": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
}
# sizes whose published number differs: Turc counts a head, Llama's card truncates digits, Mistral says 7.3B
DIFFERENT = ["bert-mini", "bert-small", "bert-medium", "llama3.2-1b", "mistral-7b"]


def test_parameter_counts() -> None:
    assert {size.name: size.parameters for size in count_model_sizes()} == COUNTS
    assert [size.name for size in count_model_sizes() if size.equal is False] == DIFFERENT


def test_counts_are_not_hard_coded() -> None:
    source = "".join(path.read_text() for path in Path(polyhead.__file__).parent.rglob("*.py"))
    digits = re.sub(r"(?<=\d)[_,](?=\d)", "", source)
    assert [name for name, count in COUNTS.items() if str(count) in digits] == []


def test_turc_counts_the_masked_lm_head() -> None:
    for name in ("tiny", "mini", "small", "medium"):
        with torch.device("meta"):
            model = bert.Bert(bert.SIZES[name]._replace(masked_lm=True))
        assert rounds_to_published(sum(p.numel() for p in model.parameters()), bert.PUBLISHED_PARAMETERS[name])


def test_head_sizes_are_those_of_the_layers() -> None:
    for size in count_model_sizes():
        # in all published sizes d_k = d_v = d_model / heads
        assert size.d_k == size.d_v == size.d_model // size.heads, size.name


def test_flops_and_cache() -> None:
    small, xl, llama, mistral, base = (
        next(count_model_sizes([name])) for name in ("gpt2-small", "gpt2-xl", "llama3-8b", "mistral", "bert-base")
    )
    # 12 d² per layer, and the head
    assert small.flops == 2 * (12 * 12 * 768**2 + 50257 * 768)
    assert small.attention_flops == 4 * 12 * 768 * 1024
    assert small.cache_bytes == 2 * 12 * 768 * 2
    assert (llama.kv_heads, llama.cache_bytes) == (8, 2 * 32 * 8 * 128 * 2)
    assert mistral.keys == 4096
    assert (base.cache_bytes, base.flops) == (None, 2 * 12 * 12 * 768**2)
    assert next(count_model_sizes(["gpt2-xl"], context=100)).attention_flops == 4 * 48 * 1600 * 100
    assert next(count_model_sizes(["gpt2-xl"], context=10**6)) == xl


@pytest.mark.parametrize(
    ("count", "published", "equal"),
    [
        (109_482_240, "110M", True), (109_482_240, "109M", True), (109_482_240, "108M", False), (68_976_648_192, "70B", True),
        (1_557_611_200, "1.5B", False), (1_557_611_200, "1558M", True), (1_235_814_400, "1.23B", False), (95, "0.1K", True),
    ],
)  # fmt: skip
def test_rounds_to(count: int, published: str, equal: bool) -> None:
    assert rounds_to_published(count, published) is equal


def test_format_count() -> None:
    numbers = (0, 7, 999, 1000, 36_864, 999_499, 999_500, 124_439_808, 174_604_259_328, 10**16)
    assert [format_count(n) for n in numbers] == [
        "0",
        "7",
        "999",
        "1K",
        "36.9K",
        "999K",
        "1M",
        "124M",
        "175B",
        "1e+04T",
    ]


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="pip install 'polyhead[inspect]'")
    monkeypatch.setenv("COLUMNS", "70")
    main(["sizes"])
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in shown.splitlines()[1:] if line[:1].islower()}
    assert rows.keys() == COUNTS.keys()
    assert rows["gpt2-small"] == [
        "gpt2-small", "12", "768", "12", "64", "64", "124,439,808", "124M", "124M", "yes", "247M", "37.7M", "1,024", "36.9kB"
    ]  # fmt: skip
    assert rows["llama3-70b"][2:6] == ["8,192", "64/8", "128", "128"]
    assert rows["bert-base"][-1] == "–"
    assert rows["bert-minilm-l6"][4:6] == ["32", "32"] and rows["bert-minilm-l6"][8:10] == ["–", "–"]
    assert shown.split()[:6] == ["name", "layers", "d_model", "heads", "d_k", "d_v"]
    assert "\x1b" not in shown
    assert "2 x the parameters of all linear layers" in shown and "float16 or bfloat16" in shown


@pytest.mark.parametrize("columns", [20, 40, 80, 120, 200])
def test_narrow_terminals_drop_columns_and_truncate_nothing(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less important columns are dropped, and a note names them; the others are complete."""
    pytest.importorskip("rich", reason="pip install 'polyhead[inspect]'")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    names = ["bert-minilm-l12", "gpt2-xl", "gpt3", "llama3.2-1b"]
    main(["sizes", *names])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    head, *rows = shown.split("\n\n")[0].splitlines()
    assert "…" not in shown
    numbers = {row.split()[0]: re.findall(r"[\d,]{9,}", row)[0] for row in rows}
    assert numbers == {name: f"{COUNTS[name]:,}" for name in names}
    assert columns < 40 or max(map(len, (head, *rows))) <= columns
    assert ("Hidden, as the terminal is too narrow:" in " ".join(shown.split())) == (columns < 140)
    assert ("cache per token" in head) == (columns >= 80) and ("equal" in head) == (columns >= 120)
    assert ("d_k  d_v" in head) == (columns >= 120)


def test_names_are_case_insensitive() -> None:
    assert [size.name for size in count_model_sizes(["GPT2-XL", "Mistral"])] == ["gpt2-xl", "mistral-7b"]


def run_with_output(out: int, *arguments: str) -> tuple[int, str]:
    """The exit code and stderr of a run whose stdout is this file descriptor."""
    command = [sys.executable, "-m", "polyhead", "sizes", "gpt2", *arguments]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    os.close(out)
    return done.returncode, done.stderr


def test_closed_pipe_is_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert run_with_output(writer, "--json") == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing")
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_full_disk_is_an_error(arguments: list[str]) -> None:
    if not arguments:
        pytest.importorskip("rich", reason="pip install 'polyhead[inspect]'")
    message = "polyhead sizes: the output cannot be written: No space left on device\n"
    assert run_with_output(os.open("/dev/full", os.O_WRONLY), *arguments) == (1, message)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["sizes", "gpt2-xl", "70b", "--json", "--context", "512"])
    (xl, *others) = json.loads(capsys.readouterr().out)
    assert (xl["name"], xl["parameters"], xl["published"], xl["equal"], xl["keys"]) == ("gpt2-xl", COUNTS["gpt2-xl"], "1558M", True, 512)  # fmt: skip
    assert [xl[name] for name in ("layers", "d_model", "heads", "kv_heads", "d_k", "d_v")] == [48, 1600, 25, 25, 64, 64]
    assert [size["name"] for size in others] == ["llama2-70b", "llama3-70b"]


def test_runtime_and_imports() -> None:
    """In a new process all sizes are built within seconds, without torch's compiler, and without rich for JSON."""
    code = (
        "import sys, time\nfrom polyhead.cli.main import main\nstart = time.perf_counter()\nmain(['sizes', '--json'])\n"
        "print(time.perf_counter() - start, file=sys.stderr)\n"
        "assert 'torch._dynamo' not in sys.modules and 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # 1 s on an idle machine
    assert float(done.stderr) < 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["gpt5"],
            "polyhead sizes: NAME must be part of the name of a size, got 'gpt5'; there are bert-base, .*, mistral-7b",
        ),
        (["--context", "0"], r"polyhead sizes: --context must be an integer in \[1, 2147483647\], got 0"),
    ],
)
def test_error_messages(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["sizes", *arguments])


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(
        SystemExit, match=r"polyhead sizes: printing the table requires rich: pip install 'polyhead\[inspect\]'"
    ):
        main(["sizes", "gpt2-small"])
