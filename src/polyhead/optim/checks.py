"""What optimizers say of options and of saved states that are not theirs."""

from __future__ import annotations

import difflib
from typing import Any

from torch import Tensor

# Words of torch's and geoopt's optimizers that mean nothing here.
_FOREIGN = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "stabilize")


def check_words(group: dict[str, Any], known: dict[str, Any]) -> None:
    """Raise for options of other optimizers that are set, and for those that are misspelt. Names of the caller's own may stand."""
    for word, value in group.items():
        if word in _FOREIGN and value:
            raise ValueError(f"{word}: it is {value!r}; it must be left out, since this optimizer has no such option")
        near = difflib.get_close_matches(word, known, 1, 0.85) if word not in known else []
        if near:
            raise ValueError(f"{word}: there is no such option; {near[0]} is meant?")


def check_state(name: str, saved: dict[str, Any], own: dict[str, Tensor]) -> None:
    """Raise where what was saved of a parameter is not what this optimizer keeps, or of another shape."""
    tensors = {word: value for word, value in saved.items() if word != "step"}
    if tensors and set(tensors) != set(own):
        raise ValueError(
            f"state_dict: of {name} it has {', '.join(tensors)}; it must be {', '.join(own)}, as this optimizer keeps them"
        )
    for word, value in tensors.items():
        if value.shape != own[word].shape:
            raise ValueError(
                f"state_dict: {word} of {name} is {tuple(value.shape)}; it must be {tuple(own[word].shape)}, with the options of this "
                "optimizer"
            )


def without_none(saved: dict[str, Any]) -> dict[str, Any]:
    """torch's SGD says None where it keeps nothing."""
    return {word: value for word, value in saved.items() if value is not None}
