"""`polyhead inspect --image`: the page, the printed findings, preprocessing and the error messages."""

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

from polyhead.cli.inspect_image import HeadRow, _build_summary_lines
from polyhead.cli.main import main
from polyhead.inspection.vision_loading import load_vision_model, read_image

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Untrained models; head 2 in the first layer of the ViT attends to the patch on the right."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    vit = transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=64, patch_size=8))
    set_shift_head(vit)
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
def set_shift_head(vit):
    """Encode rows and columns as angles, and let head 2 of layer 0 rotate the column's angle by one step."""
    position = next(p for name, p in vit.named_parameters() if name.endswith("position_embeddings"))
    row, column = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    angle = lambda n: 2 * torch.pi * n.flatten() / 16
    circles = torch.stack((angle(row).cos(), angle(row).sin(), angle(column).cos(), angle(column).sin()), -1)
    position.zero_()
    position[0, 1:, :4] = 5 * circles
    layer = vit.layers[0].attention
    query, key = (next(m for name, m in layer.named_modules() if name.endswith(end)) for end in ("q_proj", "k_proj"))
    step = torch.tensor(2 * torch.pi / 16)
    rotation = torch.tensor([[step.cos(), -step.sin()], [step.sin(), step.cos()]])
    for projection in (query, key):
        projection.weight[16:24] = 0
        projection.bias[16:24] = 0
        projection.weight[16:20, :4] = 6 * torch.eye(4)
    query.weight[18:20, 2:4] = 6 * rotation


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
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


def test_shift_head_is_the_headline(models, capsys):
    run("--image", "photo.png", "--model", models / "vit", "--at", "3,5")
    shown = capsys.readouterr().out
    headline = re.match(
        r"L0H2 acts like a convolution tap: (\d+)% of the patches attend most to the patch 1 right\.", shown
    )
    # patches of the last column have no patch on their right
    assert 80 <= int(headline[1]) <= 88
    line = next(line for line in shown.splitlines() if line.startswith("L0H2  "))
    assert line.split()[1:3] == ["1", "right"]
    assert "1 of 8 heads act like a convolution tap" in " ".join(shown.split())
    assert len([line for line in shown.splitlines() if re.match(r"L\dH\d ", line)]) >= 8
    data = record()
    assert data["title"] == "photo.png · vit" and data["initial_head"] == [0, 2]
    assert data["image"]["first"] == 1 + 3 * 8 + 5
    assert [entry["image"]["sizes"] for entry in data["layers"]] == [[8, 8]] * 2
    assumed = "has no image_mean and image_std; 0.5 was assumed"
    assert assumed in " ".join(shown.split()) and assumed in data["notes"][0]
    assert [path.name for path in sorted(Path().iterdir())] == ["heads.html", "photo.jpg", "photo.png"]


@pytest.mark.parametrize("name, grid", [("clip", [4, 4]), ("wide", [4, 4])])
def test_other_model_types(models, name, grid, capsys):
    run("--image", "photo.jpg", "--model", models / name, "--all", "--out", "page.html", "--at", "0")
    shown = capsys.readouterr().out
    assert all(f"L{layer}H{head} " in shown for layer in range(2) for head in range(4))
    assert "No head stands out" in shown and "no mean distance is much below that of uniform attention" in " ".join(
        shown.split()
    )
    assert "Page written to page.html" in shown
    data = record("page.html")
    assert data["layers"][0]["image"]["sizes"] == grid and data["image"]["first"] == 0


def test_preprocessing_follows_the_config(models, tmp_path):
    photo = read_image("photo.png")
    plain = load_vision_model(str(models / "vit"))
    assert plain.center_crop(photo) is photo
    x = plain.preprocess(photo)
    assert x.shape == (1, 3, 64, 64) and -1 <= float(x.min()) < -0.9 and 0.9 < float(x.max()) <= 1
    said = {"do_center_crop": True, "size": {"shortest_edge": 80}, "crop_size": {"height": 64, "width": 64}}
    said |= {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.5]}
    other = plain._replace(options=said)
    part = other.center_crop(photo)
    assert part.size == (72, 72)
    assert np.array_equal(np.asarray(part), np.asarray(photo)[9:81, 24:96])
    small = np.asarray(part.resize((64, 64), 2)).astype("f4").transpose(2, 0, 1) / 255
    want = (small - np.array([0.4, 0.5, 0.6])[:, None, None]) / np.array([0.2, 0.25, 0.5])[:, None, None]
    assert np.allclose(other.preprocess(part)[0], want, atol=1e-5)
    squashed = plain._replace(options={**said, "size": {"height": 128, "width": 64}})
    assert squashed.center_crop(photo).size == (120, 45)
    assert float(plain._replace(options={"do_normalize": False}).preprocess(photo).min()) >= 0


def test_preprocessing_equals_transformers(models):
    if not hasattr(transformers, "ViTImageProcessorPil"):
        pytest.skip("this transformers has no processor without torchvision: preparing is NOT compared with it")
    photo, plain = read_image("photo.png"), load_vision_model(str(models / "vit"))
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
        assert torch.allclose(plain._replace(options=prepared).preprocess(photo), want, atol=1e-5)


def test_exif_orientation_and_palettes():
    image = Image.fromarray(np.zeros((4, 6, 3), np.uint8))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save("rotated.jpg", exif=exif)
    assert read_image("rotated.jpg").size == (4, 6)
    Image.fromarray(np.zeros((4, 6), np.uint8)).convert("P").save("palette.png")
    assert read_image("palette.png").mode == "RGB"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a text", "--image", "photo.png"], "image: pass a text or --image F, not both"),
        (["--file", "f.txt", "--image", "photo.png"], "image: pass a text or --image F, not both"),
        (["--image", "photo.png"], "model must be given for images, since there is no default; pass --model M: a ViT"),
        (["--image", "absent.png", "--model", "vit"], "image must be an existing file, got absent.png"),
        (["--image", "bad.png", "--model", "vit"], "image bad.png cannot be read: "),
        (["--image", "cut.png", "--model", "vit"], "image cut.png cannot be read: "),
        (
            ["--image", "photo.png", "--model", "bert"],
            "model must have an image_size and a patch_size in config.json, got 'bert' ('bert') without them",
        ),
        (["--image", "photo.png", "--model", "./absent"], "absent: found neither a folder"),
        (
            ["--image", "photo.png", "--model", "pickled"],
            "model must have a model.safetensors, got pickled without one; pytorch_model.bin is a pickle and is not read: ",
        ),
        (["a text", "--model", "pickled"], "model.safetensors"),
        (["--image", "photo.png", "--model", "resnet"], "model must have attention modules, got "),
        (
            ["--image", "photo.png", "--model", "vit-base"],
            "model must be a folder, an installed package or a Hugging Face Hub id, owner/name, got 'vit-base'",
        ),
        (
            ["--image", "photo.png", "--model", "vit", "--at", "x"],
            "at must be ROW,COLUMN, such as 3,5, or the index of a token, such as 0 for [CLS], got 'x'",
        ),
        (["--image", "photo.png", "--model", "vit", "--at", "8,0"], "at[0] must be an integer in [0, 7], got 8"),
        (["--image", "photo.png", "--model", "vit", "--treebank", "f"], "treebank: --treebank applies to texts only"),
        (["--image", "photo.png", "--model", "odd"], "preprocessor_config.json: the file must be JSON"),
        (
            ["--image", "photo.png", "--model", "vit", "--out", "no/page.html"],
            "out must be in a folder that exists, got no/page.html; there is no folder ",
        ),
        (["a text", "--at", "3,5"], "at: --at selects a patch of an image; pass --image F too"),
        (["a text", "--model", "vit"], "model must have a tokenizer.json to read a text, got "),
        ([], "text: pass a text"),
    ],
)
def test_error_messages(arguments, message, models):
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
    error = str(stopped.value)
    assert error.startswith("polyhead inspect: ")
    assert message in error
    assert Path("heads.html").read_text() == "an older page"


def test_missing_pillow(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match=r"images are read with Pillow: pip install 'polyhead\[inspect\]'"):
        run("--image", "photo.png", "--model", models / "vit")


def test_grey_images_of_all_bit_depths():
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
            ValueError, match=r"odd.tif cannot be read: greys must be in 0..1, 0..255 or 0..65535, got "
        ):
            read_image("odd.tif")


def test_transparent_pixels_become_white():
    clear = np.zeros((4, 6, 4), np.uint8)
    clear[:2] = (200, 10, 20, 255)
    Image.fromarray(clear).save("clear.png")
    palette = Image.fromarray(clear[..., :3]).quantize(2)
    # one transparency per colour, for which Pillow warns
    palette.save("palette.png", transparency=bytes((255, 0)) if np.asarray(palette)[0, 0] == 0 else bytes((0, 255)))
    for name in ("clear.png", "palette.png"):
        seen = np.asarray(read_image(name)).astype(int)
        assert np.abs(seen[0, 0] - (200, 10, 20)).max() <= 4 and (seen[3, 0] == 255).all(), name
    Image.fromarray(clear).getchannel(0).convert("LA").save("grey.png")
    assert read_image("grey.png").mode == "RGB"


def test_processor_config_takes_precedence(models, tmp_path):
    """transformers 5 writes the image processor into processor_config.json."""
    folder = tmp_path / "own"
    folder.mkdir()
    for file in (models / "vit").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert len(load_vision_model(str(folder)).preprocessing_notes) == 1
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    assert (
        load_vision_model(str(folder)).options["image_mean"] == [0.1] * 3
        and not load_vision_model(str(folder)).preprocessing_notes
    )
    part = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "resample": 0}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": part, "processor_class": "X"}))
    assert load_vision_model(str(folder)).options == part
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "X"}))
    assert load_vision_model(str(folder)).options["image_mean"] == [0.1] * 3


def test_zero_and_false_in_the_config_are_honoured(models):
    photo, plain = read_image("photo.png"), load_vision_model(str(models / "vit"))
    nearest = np.asarray(photo.resize((64, 64), 0)).astype("f4").transpose(2, 0, 1)
    as_is = {"resample": 0, "image_mean": 0, "image_std": 1.0}
    assert np.allclose(plain._replace(options=as_is).preprocess(photo)[0], nearest / 255, atol=1e-6)
    raw = {"resample": 0, "do_rescale": False, "do_normalize": False}
    assert (
        np.array_equal(plain._replace(options=raw).preprocess(photo)[0], nearest)
        and not plain._replace(options=raw).preprocessing_notes
    )
    fixed = plain._replace(options={"do_resize": False, "do_center_crop": True, "crop_size": 64, "do_normalize": False})
    part = fixed.center_crop(photo)
    assert np.array_equal(np.asarray(part), np.asarray(photo)[13:77, 28:92])
    assert np.allclose(255 * fixed.preprocess(part)[0], np.asarray(part).transpose(2, 0, 1), atol=1e-4)
    with pytest.raises(
        ValueError, match=r"image must have 64 x 64 pixels, since .* has do_resize: false, got 90 x 120"
    ):
        fixed.preprocess(photo)


def test_loading_prints_nothing(models, capfd):
    # the classification head is not loaded: transformers would report its unused weights
    classifier = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=64, patch_size=8))
    classifier.save_pretrained("classifier")
    capfd.readouterr()
    transformers.utils.logging.enable_progress_bar()
    level = transformers.utils.logging.get_verbosity()
    load_vision_model("classifier")
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err == ""
    assert transformers.utils.logging.is_progress_bar_enabled() and transformers.utils.logging.get_verbosity() == level


def test_equal_distances_are_not_ranked():
    row = HeadRow("L0H0", (0, 0), 0.1, "1 up", 2.71, 3.0, 0.0)
    rows = [row, row._replace(name="L0H1", distance=2.73)]
    assert len(_build_summary_lines(rows)) == 1
    assert (
        "from 2.7 patches (L0H0) to 3.0 (L0H1)"
        in _build_summary_lines([row, row._replace(name="L0H1", distance=3.0)])[1]
    )


def test_help_explains_token_indices(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    assert "the index of a token: 0 for [CLS]" in " ".join(capsys.readouterr().out.split())
