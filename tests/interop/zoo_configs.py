"""Small configurations of transformers' architectures: their defaults, shrunk by the names of their fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY, HEADS = 128, 4


class Size(NamedTuple):
    """The size of a shrunk architecture."""

    layers: int = 2
    # divisible by 2, 3, 4, 6, 8, 12, 16, 24 and 32; None keeps all widths
    width: int | None = 96
    # whether fields whose default is None get the value in FILLED
    filled: bool = False


# the first that can be built and run is used
SIZES = (
    Size(),
    Size(filled=True),
    Size(width=512, filled=True),
    Size(layers=9, filled=True),
    Size(width=None, filled=True),
)

LAYERS = r"(n|num)_(layers?|blocks?)|depth|\w+_(layers|depth|blocks)|num_\w+_(layers|blocks)"
# upper bounds by name; the first match is used
AT_MOST = (
    (r"type_vocab_size|num_hidden_groups|inner_group_num", 10**9),
    (r".*vocab_size.*|n_vocab|\w*codebook_size|num_embeddings", VOCABULARY),
    (r"n_routed_experts|n_experts|\w*num_\w*experts", 4),
    (r"num_experts_per_tok(en)?|top_k_experts|moe_k|moe_top_?k|top_k", 2),
    (r"n_group|topk_group", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_\w*positions?|context_length", 256),
    (r"image_size", 224),
)
NARROW = (
    (r"qk_rope_head_dim|rotary_dim", lambda width: 8),
    (r"qk_nope_head_dim", lambda width: 16),
    (r"head_dim|d_kv|d_head|\w+_head_dim|attention_head_size", lambda width: width // HEADS),
    (r"n_heads?|num_heads|\w*attention_heads|\w+_heads", lambda width: HEADS),
    (r"\w*lora_rank", lambda width: 16),
    (r"\w*intermediate_size\w*|\w*ffn_\w+|d_ff|n_inner|\w*mlp_dim|\w*feed_?forward\w*|intermediate_dim|\w+_ffn", lambda width: 64),
    (r"num_channels|in_channels|\w*mel_bins|\w*_kernel_dim|mel_dim|audio_channels", lambda width: 10**9),
    (r"d_model|n_embd|n_embed|width|dim|\w*hidden_(size|dim)|\w*embed(ding)?_(dim|size)|\w+_dim|out_channels", lambda width: width),
)  # fmt: skip
KEY_HEADS = r"(n|num)_(kv|key_value)_heads|n_head_kv|\w+_key_value_heads|multi_query_group_num"
IDS = r"\w*token_(id|index)|\w*_(id|token)"
FILLED = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "num_key_value_heads": HEADS // 2, "moe_intermediate_size": 64,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "prediction_length": 4, "context_length": 8,
    "sliding_window": 5, "layer_types": None, "mask_token_id": 1, "head_dim": 24,
    "shared_expert_intermediate_size": 64, "num_local_experts": 4,
}  # fmt: skip


def small(model_type: str, size: Size) -> PreTrainedConfig:
    """The configuration of an architecture at that size."""
    return shrink(CONFIG_MAPPING[model_type](), size)


def shrink(config: PreTrainedConfig, size: Size) -> PreTrainedConfig:
    """The same configuration with few layers and, unless `size.width` is None, small widths."""
    given, defaults = dict(fields(config)), dict(fields(type(config)()))
    made = {name: shrunk(name, value, given, size) for name, value in given.items()}
    # unchanged fields may depend on the others
    changed = {name: value for name, value in made.items() if value is not given[name] or value != defaults[name]}
    small = type(config)(**{**changed, **GIVEN.get(config.model_type, dict)()})
    if hasattr(config, "out_features"):
        # a backbone returns as many features as before, if it has enough stages
        small.out_features = small.stage_names[-len(config.out_features) :]
    return small


def fields(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration, with their values."""
    # per-layer fields are shrunk like the others
    config.allow_global_per_layer_attribute_access = True
    for field in dataclasses.fields(config):
        if not field.name.startswith("_"):
            yield field.name, getattr(config, field.name, None)


def shrunk(name: str, value: Any, given: dict[str, Any], size: Size) -> Any:
    """The shrunk value of a field."""
    if isinstance(value, PreTrainedConfig):
        return shrink(value, size)
    depth = given.get("num_hidden_layers", given.get("n_layer"))
    if isinstance(value, list | tuple) and isinstance(depth, int) and len(value) == depth > size.layers:
        return picked(list(value), size.layers)
    if isinstance(value, dict) and "mrope_section" in value and size.width is not None:
        half = int(size.width // HEADS * value.get("partial_rotary_factor", 1.0)) // 2
        return {**value, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    if value is None and size.filled:
        return FILLED.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return at_most(name, value, given, size)


def at_most(name: str, value: int, given: dict[str, Any], size: Size) -> int:
    """The value, limited by the bound of its name."""
    if re.fullmatch(IDS, name):
        return value if value < VOCABULARY else VOCABULARY - 1 - sum(map(ord, name)) % 23
    if re.fullmatch(LAYERS, name):
        return min(value, size.layers)
    if re.fullmatch(KEY_HEADS, name) and size.width is not None:
        alike = value == given.get("num_attention_heads", given.get("n_head"))
        return min(value, HEADS if alike else HEADS // 2)
    for pattern, most in AT_MOST:
        if re.fullmatch(pattern, name):
            return min(value, most)
    for pattern, narrow in NARROW if size.width is not None else ():
        if re.fullmatch(pattern, name):
            return min(value, narrow(size.width))
    return value


def picked(values: list[Any], count: int) -> list[Any]:
    """`count` of the values, one of each kind if possible."""
    kinds = [i for i, value in enumerate(values) if value not in values[:i]][:count]
    rest = [i for i in range(len(values)) if i not in kinds]
    return [values[i] for i in sorted(kinds + rest[: count - len(kinds)])]


def _resnet() -> dict[str, Any]:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"]
    )
    return {"backbone_config": backbone, "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}


def _layers(**fields: Any) -> Any:
    return lambda: {"num_hidden_layers": 2, **fields}


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "mrope_section": [4, 4, 4]}
WORDS = {"<image>": 100, "<s>": 1, "IMGIMGA": 101, "IMGIMGB": 102}
# fields that the defaults lack, or that do not fit small sizes
GIVEN: dict[str, Any] = {
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "table-transformer", "dab-detr"), _resnet),
    **dict.fromkeys(
        ("glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text", "qwen2_vl_text", "qwen2_5_vl_text",
         "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_omni_talker", "hunyuan_vl_text"),
        lambda: {"rope_parameters": MROPE},
    ),
    **dict.fromkeys(
        ("rt_detr", "rt_detr_v2", "d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4"),
        lambda: {"decoder_in_channels": [96, 96, 96]},
    ),
    "sam3_lite_text_text_model": lambda: {"num_hidden_layers": 3},
    "bamba": _layers(attn_layer_indices=[1]),
    "granitemoehybrid": _layers(layer_types=["mamba", "attention"]),
    "cohere_compass_text": _layers(
        layer_types=["full_attention", "sliding_attention"], sliding_window=5,
        rope_parameters={"full_attention": ROPE, "sliding_attention": ROPE},
    ),
    "deepseek_ocr2_text": _layers(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    "unlimited_ocr_text": _layers(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    "gemma3n_text": _layers(layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0, sliding_window=5),
    "lfm2_moe": _layers(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "recurrent_gemma": _layers(block_types=["recurrent", "attention"], attention_window_size=64),
    "longcat_flash": lambda: {"head_dim": 8, "zero_expert_num": 2},
    "nemotron_h": lambda: {"layers_block_type": ["mamba", "attention"], "n_groups": 1},
    "musicgen": lambda: {"dropout": 0.0},
    "xmod": lambda: {"default_language": "en_XX"},
    "chameleon": lambda: {"vocabulary_map": WORDS},
    "emu3": lambda: {"vocabulary_map": WORDS},
    "patchtsmixer": lambda: {"self_attn": True},
    "esm": lambda: {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "absolute"},
    "gpt_neo": lambda: {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "blip-2": lambda: {"image_token_index": 100},
    "instructblip": lambda: {"image_token_index": 100},
    "t5gemma2_text": lambda: {"dropout_rate": 0.0},
    "t5gemma2_decoder": lambda: {"dropout_rate": 0.0},
    "moonshine_streaming": lambda: {"num_key_value_heads": HEADS},
    "zamba": lambda: {"num_hidden_layers": 6, "layers_block_type": ["mamba"] * 3 + ["hybrid"] + ["mamba", "hybrid"]},
}  # fmt: skip
