"""`polyhead inspect --image`: the page and the screen, and what is said where something is wrong."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not all(map(importlib.util.find_spec, ("rich", "safetensors", "PIL", "transformers"))):
    pytest.skip(
        "rich, safetensors, Pillow or transformers is not installed: inspect --image is NOT tested",
        allow_module_level=True,
    )

import transformers
from PIL import Image

from polyhead.cli.inspect_image import Row, _summary
from polyhead.cli.main import main
from polyhead.inspection.vision_loading import read_image, seeing

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A ViT that is not trained, but for one head of its first layer, which looks at the patch to the right; and a text model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    vit = transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=64, patch_size=8))
    shifts(vit)
    vit.save_pretrained(folder / "vit")
    clip = transformers.CLIPConfig(
        vision_config={**SIZES, "image_size": 32, "patch_size": 8},
        text_config={**SIZES, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    )
    transformers.CLIPModel(clip).save_pretrained(folder / "clip")
    wide = transformers.ViTConfig(**SIZES, image_size=(32, 64), patch_size=(8, 16))
    transformers.ViTModel(wide).save_pretrained(folder / "wide")
    bert = transformers.BertConfig(**SIZES, vocab_size=100)
    transformers.BertModel(bert).save_pretrained(folder / "bert")
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    transformers.ResNetModel(resnet).save_pretrained(folder / "resnet")
    return folder


@torch.no_grad()
def shifts(vit):
    """Positions are circles for rows and columns, and head 2 of layer 0 turns the column's by one step."""
    embedded = dict(vit.named_parameters())
    position = next(p for name, p in embedded.items() if name.endswith("position_embeddings"))
    row, column = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    angle = lambda n: 2 * torch.pi * n.flatten() / 16
    circles = torch.stack((angle(row).cos(), angle(row).sin(), angle(column).cos(), angle(column).sin()), -1)
    position.zero_()
    position[0, 1:, :4] = 5 * circles
    layer = vit.layers[0].attention
    query, key = (next(m for name, m in layer.named_modules() if name.endswith(end)) for end in ("q_proj", "k_proj"))
    step = torch.tensor(2 * torch.pi / 16)
    turn = torch.tensor([[step.cos(), -step.sin()], [step.sin(), step.cos()]])
    for projection in (query, key):
        projection.weight[16:24] = 0
        projection.bias[16:24] = 0
        projection.weight[16:20, :4] = 6 * torch.eye(4)
    query.weight[18:20, 2:4] = 6 * turn


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    colours = np.linspace(0, 255, 90 * 120 * 3).reshape(90, 120, 3).astype(np.uint8)
    Image.fromarray(colours).save("photo.png")
    Image.fromarray(colours).save("photo.jpg")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*arguments):
    main(["inspect", *map(str, arguments)])


def record(path="heads.html"):
    return json.loads(re.search(r'id="record">(.*?)</script>', Path(path).read_text(), re.S)[1])


def test_a_head_that_shifts_is_found(models, capsys):
    run("--image", "photo.png", "--model", models / "vit", "--at", "3,5")
    shown = capsys.readouterr().out
    told = re.match(
        r"L0H2 is like a tap of a convolution: (\d+)% of the patches look most at the patch 1 right\.", shown
    )
    # those of the last column have none to the right
    assert 80 <= int(told[1]) <= 88
    line = next(line for line in shown.splitlines() if line.startswith("L0H2  "))
    assert line.split()[1:3] == ["1", "right"]
    assert "1 of 8 heads are like a tap of a convolution" in " ".join(shown.split())
    assert len([line for line in shown.splitlines() if re.match(r"L\dH\d ", line)]) >= 8
    given = record()
    assert given["title"] == "photo.png · vit" and given["star"] == [0, 2]
    assert given["image"]["first"] == 1 + 3 * 8 + 5
    assert [one["image"]["sizes"] for one in given["layers"]] == [[8, 8]] * 2
    assumed = "does not say image_mean and image_std; 0.5 was assumed"
    assert assumed in " ".join(shown.split()) and assumed in given["notes"][0]
    assert [path.name for path in sorted(Path().iterdir())] == ["heads.html", "photo.jpg", "photo.png"]


@pytest.mark.parametrize("name, grid", [("clip", [4, 4]), ("wide", [4, 4])])
def test_models_of_other_kinds(models, name, grid, capsys):
    run("--image", "photo.jpg", "--model", models / name, "--all", "--out", "page.html", "--at", "0")
    shown = capsys.readouterr().out
    assert all(f"L{layer}H{head} " in shown for layer in range(2) for head in range(4))
    assert "No head stands out" in shown and "none much nearer than even attention" in " ".join(shown.split())
    assert "The page: page.html" in shown
    given = record("page.html")
    assert given["layers"][0]["image"]["sizes"] == grid and given["image"]["first"] == 0


def test_images_are_prepared_as_the_folder_says(models, tmp_path):
    photo = read_image("photo.png")
    plain = seeing(str(models / "vit"))
    assert plain.cropped(photo) is photo
    x = plain.prepare(photo)
    assert x.shape == (1, 3, 64, 64) and -1 <= float(x.min()) < -0.9 and 0.9 < float(x.max()) <= 1
    said = {"do_center_crop": True, "size": {"shortest_edge": 80}, "crop_size": {"height": 64, "width": 64}}
    said |= {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.5]}
    other = plain._replace(prepared=said)
    part = other.cropped(photo)
    assert part.size == (72, 72)
    assert np.array_equal(np.asarray(part), np.asarray(photo)[9:81, 24:96])
    small = np.asarray(part.resize((64, 64), 2)).astype("f4").transpose(2, 0, 1) / 255
    want = (small - np.array([0.4, 0.5, 0.6])[:, None, None]) / np.array([0.2, 0.25, 0.5])[:, None, None]
    assert np.allclose(other.prepare(part)[0], want, atol=1e-5)
    squashed = plain._replace(prepared={**said, "size": {"height": 128, "width": 64}})
    assert squashed.cropped(photo).size == (120, 45)
    assert float(plain._replace(prepared={"do_normalize": False}).prepare(photo).min()) >= 0


def test_images_are_prepared_as_transformers_prepares_them(models):
    if not hasattr(transformers, "ViTImageProcessorPil"):
        pytest.skip("this transformers has no processor without torchvision: preparing is NOT compared with it")
    photo, plain = read_image("photo.png"), seeing(str(models / "vit"))
    for options in (
        {"size": {"height": 64, "width": 64}},
        {
            "size": {"height": 64, "width": 64},
            "resample": 3,
            "image_mean": [0.4, 0.5, 0.6],
            "image_std": [0.2, 0.3, 0.5],
        },
    ):
        theirs = transformers.ViTImageProcessorPil(**options)
        want = theirs(images=photo, return_tensors="pt")["pixel_values"]
        prepared = json.loads(theirs.to_json_string())
        assert torch.allclose(plain._replace(prepared=prepared).prepare(photo), want, atol=1e-5)


def test_a_photograph_is_turned_upright():
    image = Image.fromarray(np.zeros((4, 6, 3), np.uint8))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save("turned.jpg", exif=exif)
    assert read_image("turned.jpg").size == (4, 6)
    Image.fromarray(np.zeros((4, 6), np.uint8)).convert("P").save("palette.png")
    assert read_image("palette.png").mode == "RGB"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a text", "--image", "photo.png"], "image: pass a text or --image F, not both"),
        (["--file", "f.txt", "--image", "photo.png"], "image: pass a text or --image F, not both"),
        (["--image", "photo.png"], "model: there is no default model for images; pass --model M: a ViT"),
        (["--image", "absent.png", "--model", "vit"], "image: there is no file absent.png"),
        (["--image", "bad.png", "--model", "vit"], "image: bad.png cannot be read as an image"),
        (["--image", "cut.png", "--model", "vit"], "image: cut.png cannot be read as an image"),
        (["--image", "photo.png", "--model", "bert"], "is 'bert', whose config.json has no image_size and patch_size"),
        (["--image", "photo.png", "--model", "./absent"], "absent: there is no such folder"),
        (["--image", "photo.png", "--model", "pickled"], "pickled has no model.safetensors; pickles are not read"),
        (["a text", "--model", "pickled"], "model.safetensors"),
        (["--image", "photo.png", "--model", "resnet"], "this model has no attention that can be seen"),
        (
            ["--image", "photo.png", "--model", "vit-base"],
            "model: 'vit-base' is no folder and no installed package, and no id of the Hugging Face Hub: these are owner/name",
        ),
        (["--image", "photo.png", "--model", "vit", "--at", "x"], "at: it is 'x'; it must be ROW,COLUMN"),
        (["--image", "photo.png", "--model", "vit", "--at", "8,0"], "at[0] must be an integer in [0, 7], got 8"),
        (["--image", "photo.png", "--model", "vit", "--treebank", "f"], "treebank: it is for texts"),
        (["--image", "photo.png", "--model", "odd"], "preprocessor_config.json: it is not JSON"),
        (
            ["--image", "photo.png", "--model", "vit", "--out", "no/page.html"],
            "out must be in a folder that exists, got no/page.html; there is no folder ",
        ),
        (["a text", "--at", "3,5"], "at: it is a patch of an image; pass --image F too"),
        (["a text", "--model", "vit"], "has no tokenizer.json; a text is read with one"),
        ([], "text: pass a text"),
    ],
)
def test_what_is_wrong_is_said(arguments, message, models):
    for name in ("vit", "bert", "resnet"):
        Path(name).symlink_to(models / name)
    for name in ("pickled", "odd"):
        Path(name).mkdir()
        for file in (models / "vit").iterdir():
            (Path(name) / file.name).write_bytes(file.read_bytes())
    (Path("pickled") / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, "pickled/pytorch_model.bin")
    Path("odd/preprocessor_config.json").write_text("{")
    Path("bad.png").write_text("no image")
    Path("cut.png").write_bytes(Path("photo.png").read_bytes()[:200])
    Path("heads.html").write_text("an older page")
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    said = str(stopped.value)
    assert said.startswith("polyhead inspect: ")
    assert message in said
    assert Path("heads.html").read_text() == "an older page"


def test_without_the_packages(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match=r"images are read with Pillow: pip install 'polyhead\[inspect\]'"):
        run("--image", "photo.png", "--model", models / "vit")


def test_greys_of_all_depths():
    ramp = np.linspace(0, 1, 24).reshape(4, 6)
    want = np.round(255 * ramp).astype(int)
    saved = {
        "sixteen.png": (65535 * ramp).astype(np.uint16),
        "sixteen.tif": (65535 * ramp).astype(np.uint16),
        "float.tif": ramp.astype("f4"),
        "float255.tif": (255 * ramp).astype("f4"),
        "whole.tif": (255 * ramp).astype("i4"),
        "wide.tif": (65535 * ramp).astype("i4"),
    }
    for name, values in saved.items():
        Image.fromarray(values).save(name)
        seen = read_image(name)
        assert seen.mode == "RGB" and np.abs(np.asarray(seen)[..., 1].astype(int) - want).max() <= 1, name
    dark = (np.full((4, 6), 200)).astype(np.uint16)
    Image.fromarray(dark).save("dark.png")
    assert np.asarray(read_image("dark.png")).max() == 1
    for values in (ramp - 0.5, 70000 * ramp, np.full((4, 6), np.nan)):
        Image.fromarray(values.astype("f4")).save("odd.tif")
        with pytest.raises(
            ValueError, match=r"odd.tif cannot be read as an image: its greys go from .* they must lie in"
        ):
            read_image("odd.tif")


def test_transparency_is_white():
    clear = np.zeros((4, 6, 4), np.uint8)
    clear[:2] = (200, 10, 20, 255)
    Image.fromarray(clear).save("clear.png")
    palette = Image.fromarray(clear[..., :3]).quantize(2)
    # one transparency for each colour, of which Pillow warns
    palette.save("palette.png", transparency=bytes((255, 0)) if np.asarray(palette)[0, 0] == 0 else bytes((0, 255)))
    for name in ("clear.png", "palette.png"):
        seen = np.asarray(read_image(name)).astype(int)
        assert np.abs(seen[0, 0] - (200, 10, 20)).max() <= 4 and (seen[3, 0] == 255).all(), name
    Image.fromarray(clear).getchannel(0).convert("LA").save("grey.png")
    assert read_image("grey.png").mode == "RGB"


def test_what_processors_write_is_read(models, tmp_path):
    """transformers 5 writes a processor's image part into processor_config.json."""
    folder = tmp_path / "own"
    folder.mkdir()
    for file in (models / "vit").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert len(seeing(str(folder)).notes) == 1
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    assert seeing(str(folder)).prepared["image_mean"] == [0.1] * 3 and not seeing(str(folder)).notes
    part = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "resample": 0}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": part, "processor_class": "X"}))
    assert seeing(str(folder)).prepared == part
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "X"}))
    assert seeing(str(folder)).prepared["image_mean"] == [0.1] * 3


def test_zero_and_false_are_said(models):
    photo, plain = read_image("photo.png"), seeing(str(models / "vit"))
    nearest = np.asarray(photo.resize((64, 64), 0)).astype("f4").transpose(2, 0, 1)
    as_is = {"resample": 0, "image_mean": 0, "image_std": 1.0}
    assert np.allclose(plain._replace(prepared=as_is).prepare(photo)[0], nearest / 255, atol=1e-6)
    raw = {"resample": 0, "do_rescale": False, "do_normalize": False}
    assert (
        np.array_equal(plain._replace(prepared=raw).prepare(photo)[0], nearest)
        and not plain._replace(prepared=raw).notes
    )
    fixed = plain._replace(
        prepared={"do_resize": False, "do_center_crop": True, "crop_size": 64, "do_normalize": False}
    )
    part = fixed.cropped(photo)
    assert np.array_equal(np.asarray(part), np.asarray(photo)[13:77, 28:92])
    assert np.allclose(255 * fixed.prepare(part)[0], np.asarray(part).transpose(2, 0, 1), atol=1e-4)
    with pytest.raises(
        ValueError, match=r"image: it is 90 x 120 pixels, and .* says do_resize: false; it must be 64 x 64"
    ):
        fixed.prepare(photo)


def test_transformers_prints_nothing(models, capfd):
    # a model whose head is left out: transformers would report the weights that it does not use
    whole = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=64, patch_size=8))
    whole.save_pretrained("whole")
    capfd.readouterr()
    transformers.utils.logging.enable_progress_bar()
    level = transformers.utils.logging.get_verbosity()
    seeing("whole")
    said = capfd.readouterr()
    assert said.out == "" and said.err == ""
    assert transformers.utils.logging.is_progress_bar_enabled() and transformers.utils.logging.get_verbosity() == level


def test_heads_that_are_alike_are_not_ranked():
    row = Row("L0H0", (0, 0), 0.1, "1 up", 2.71, 3.0, 0.0)
    rows = [row, row._replace(name="L0H1", distance=2.73)]
    assert len(_summary(rows)) == 1
    assert "Nearest looks L0H0, 2.7" in _summary([row, row._replace(name="L0H1", distance=3.0)])[1]


def test_the_help_names_tokens(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    assert "a token's number: 0 for [CLS]" in " ".join(capsys.readouterr().out.split())
