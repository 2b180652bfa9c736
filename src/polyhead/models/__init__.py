"""Models built from MultiHeadAttention: one file per architecture, with its sizes and the names in its checkpoints."""

from polyhead.models.bert import Bert
from polyhead.models.gpt import Gpt
from polyhead.models.llama import Llama
from polyhead.models.pretrained import Pretrained, load, load_default
from polyhead.models.tokenizer import Tokenizer, Tokens

__all__ = ["Bert", "Gpt", "Llama", "Pretrained", "Tokenizer", "Tokens", "load", "load_default"]
