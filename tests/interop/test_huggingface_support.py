"""Models with a supported attention accept `attn_implementation="polyhead"`; others raise an error that says what to use."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import polyhead
from polyhead.interop import huggingface

huggingface.register()
transformers.logging.set_verbosity(transformers.logging.CRITICAL)

WIDTH = {"vocab_size": 50, "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
OWN = "{} does not call transformers' attention interface"
TABLE = "it looks up its attention in {}, which lacks 'polyhead'"
REFUSED: dict[str, tuple[PreTrainedConfig, str, str]] = {
    "adds the mask to its scores": (
        transformers.BloomConfig(vocab_size=50, hidden_size=12, n_layer=1, n_head=2),
        "'eager' for BloomModel",
        OWN.format("BloomAttention"),
    ),
    "adds the mask, bidirectional": (
        transformers.MPNetConfig(**WIDTH),
        "'eager' for MPNetModel",
        OWN.format("MPNetAttention"),
    ),
    "does not use the interface": (
        transformers.DebertaV2Config(**WIDTH),
        "'eager' for DebertaV2Model",
        OWN.format("DebertaV2Attention"),
    ),
    "has its own table": (
        transformers.GPTJConfig(vocab_size=50, n_embd=12, n_layer=1, n_head=2, rotary_dim=2),
        "'eager' for GPTJModel",
        TABLE.format("GPTJ_ATTENTION_CLASSES"),
    ),
    "has its own table with sdpa": (
        transformers.FalconConfig(vocab_size=50, hidden_size=12, num_hidden_layers=1, num_attention_heads=2),
        "'eager' or 'sdpa' for FalconModel",
        TABLE.format("FALCON_ATTENTION_CLASSES"),
    ),
    "has no attention": (
        transformers.MambaConfig(vocab_size=50, hidden_size=12, num_hidden_layers=1),
        "'eager' for MambaModel",
        OWN.format("it"),
    ),
    "is supported on eager only": (
        transformers.SplinterConfig(**WIDTH),
        "'eager' for SplinterModel",
        "transformers supports no other implementation for it (_supports_sdpa, _supports_flash_attn, _supports_flex_attn, "
        "_supports_attention_backend are all False)",
    ),
    "changes the mask": (
        transformers.DeepseekV4Config(),
        "'eager' for DeepseekV4Model",
        "DeepseekV4Attention changes the mask before it calls transformers' attention interface",
    ),
}


def build(name: str, implementation: str | None, kind: Any = AutoModel) -> PreTrainedModel:
    return kind.from_config(copy.deepcopy(REFUSED[name][0]), attn_implementation=implementation)


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_model_is_not_built(name: str) -> None:
    _, alternatives, reason = REFUSED[name]
    message = f"attn_implementation must be {alternatives}, got 'polyhead': {reason}. A model of several parts takes one implementation per "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"), torch.device("meta"):
        build(name, "polyhead")


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "changes the mask"])
def test_an_unsupported_model_cannot_change_its_attention(name: str) -> None:
    model = build(name, "eager")
    with pytest.raises(ValueError, match=f"^attn_implementation must be {REFUSED[name][1]}"):
        model.set_attn_implementation("polyhead")
    assert model.config._attn_implementation == "eager"
    assert torch.isfinite(model(torch.ones(1, 3, dtype=torch.long)).last_hidden_state).all()


def test_other_implementations_are_unchanged() -> None:
    assert build("adds the mask to its scores", None).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="BloomModel does not support an attention implementation through"):
        build("adds the mask to its scores", "sdpa")
    assert build("has its own table with sdpa", None).config._attn_implementation == "sdpa"


def test_models_with_heads_are_refused_too() -> None:
    for name in ("adds the mask to its scores", "has no attention"):
        with pytest.raises(ValueError, match="does not call transformers' attention interface"):
            build(name, "polyhead", AutoModelForCausalLM)


def test_registering_again_does_not_wrap_twice() -> None:
    before = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation
    huggingface.register()
    assert (PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation) == before


def sam() -> transformers.SamConfig:
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 8, "mlp_dim": 8}
    vision |= {"image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [0], "num_pos_feats": 4}
    prompt = {"hidden_size": 8, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    decoder = {
        "hidden_size": 8,
        "mlp_dim": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "iou_head_hidden_dim": 8,
    }
    return transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)


PARTS = {"": "polyhead", "mask_decoder_config": "polyhead", "vision_config": "sdpa"}


def test_parts_can_have_different_implementations() -> None:
    refused = r"^attn_implementation must be 'eager' or 'sdpa' for SamVisionEncoder, got 'polyhead': it looks up its attention"
    for wrong in ("polyhead", {**PARTS, "vision_config": "polyhead"}):
        with pytest.raises(ValueError, match=refused):
            AutoModel.from_config(sam(), attn_implementation=wrong)
    model = AutoModel.from_config(sam(), attn_implementation=PARTS).eval()
    for wrong in ("polyhead", {"vision_config": "polyhead"}):
        with pytest.raises(ValueError, match=refused):
            model.set_attn_implementation(wrong)
    assert [model.config._attn_implementation, model.vision_encoder.config._attn_implementation] == ["polyhead", "sdpa"]
    pixels, points = torch.randn(1, 3, 32, 32), torch.tensor([[[[3.0, 4.0]]]])
    with torch.no_grad(), polyhead.capture(model) as seen:
        found = model(pixels, input_points=points).pred_masks
    assert any(name.startswith("mask_decoder") for name in seen)
    with torch.no_grad():
        model.set_attn_implementation({"": "eager", "mask_decoder_config": "eager"})
        torch.testing.assert_close(found, model(pixels, input_points=points).pred_masks, atol=1e-5, rtol=1e-4)


def test_a_part_without_attention_is_ignored() -> None:
    backbone = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone=None, use_pretrained_backbone=False, backbone_config=backbone, d_model=12,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8,
        decoder_ffn_dim=8, num_queries=3,
    )  # fmt: skip
    model = AutoModel.from_config(config, attn_implementation="polyhead").eval()
    pixels = torch.randn(1, 3, 40, 40)
    with torch.no_grad():
        found = model(pixels).last_hidden_state
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(pixels).last_hidden_state, atol=1e-5, rtol=1e-4)
        model.set_attn_implementation("polyhead")
    with pytest.raises(ValueError, match=r"^attn_implementation must be 'eager' for ResNetBackbone, got 'polyhead'"):
        transformers.AutoBackbone.from_config(backbone, attn_implementation="polyhead")


class Config(PreTrainedConfig):
    model_type = "user_model"
    hidden_size: int = 8


def call_interface(module: Any, x: Tensor, mask: Tensor) -> Tensor:
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, None)
    return attend(module, x[:, None], x[:, None], x[:, None], mask)[0][:, :, 0]


class InterfaceAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return call_interface(self, x, mask)


class OwnAttention(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x @ x.mT + mask[:, 0]).softmax(-1) @ x


class MaskAdding(OwnAttention):
    """The same under a name without "attention"."""


class MaskSlicing(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        s = x @ x.mT
        s += mask[:, 0, :, : x.shape[1]]
        return s.softmax(-1) @ x


class MaskFilling(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x @ x.mT).masked_fill(~mask[:, 0, :, : x.shape[1]], -torch.inf).softmax(-1) @ x


class UserModel(PreTrainedModel):
    config_class = Config
    _supports_attention_backend = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.make_layers(config))
        self.post_init()

    def make_layers(self, config: Config) -> list[nn.Module]:
        return [InterfaceAttention(config)]

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = create_causal_mask(self.config, inputs_embeds, attention_mask, None)
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, mask)
        return inputs_embeds


class UnflaggedModel(UserModel):
    _supports_attention_backend = False


class OwnAttentionModel(UserModel):
    def make_layers(self, config: Config) -> list[nn.Module]:
        return [OwnAttention()]


class MixedModel(UserModel):
    def make_layers(self, config: Config) -> list[nn.Module]:
        return [InterfaceAttention(config), OwnAttention()]


class FlaggedModel(MixedModel):
    _supports_sdpa = True


class MaskAddingModel(UserModel):
    def make_layers(self, config: Config) -> list[nn.Module]:
        return [InterfaceAttention(config), MaskAdding()]


class MaskSlicingModel(UserModel):
    def make_layers(self, config: Config) -> list[nn.Module]:
        return [InterfaceAttention(config), MaskSlicing()]


class MaskFillingModel(UserModel):
    def make_layers(self, config: Config) -> list[nn.Module]:
        return [InterfaceAttention(config), MaskFilling()]


def on_polyhead(kind: type[UserModel]) -> UserModel:
    return kind(Config(attn_implementation="polyhead")).eval()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnAttentionModel, OWN.format("OwnAttention")),
        (MixedModel, OWN.format("OwnAttention")),
        (
            UnflaggedModel,
            r"transformers supports no other implementation for it \(_supports_sdpa, .*_supports_attention_backend are all False\)",
        ),
    ],
)
def test_models_of_users_are_checked_too(kind: type[UserModel], reason: str) -> None:
    with pytest.raises(
        ValueError, match=f"^attn_implementation must be 'eager' for {kind.__name__}, got 'polyhead': {reason}"
    ):
        on_polyhead(kind)


@pytest.mark.parametrize("kind", [FlaggedModel, MaskAddingModel, MaskSlicingModel])
def test_models_that_add_the_mask_raise(kind: type[UserModel]) -> None:
    keep = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"^attention_mask must be used as a condition .*attn_implementation='eager'"):
        on_polyhead(kind)(torch.randn(2, 5, 8), keep)


def test_models_that_use_the_mask_as_a_condition_work() -> None:
    x = torch.randn(2, 5, 8)
    once = on_polyhead(UserModel)(x)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    s = (x @ x.mT / 8**0.5).masked_fill(future, -torch.inf)
    torch.testing.assert_close(once, s.softmax(-1) @ x)
    s = (once @ once.mT).masked_fill(future, -torch.inf)
    torch.testing.assert_close(on_polyhead(MaskFillingModel)(x), s.softmax(-1) @ once)
