"""Limits on files from untrusted sources, each with its reason.

A file beyond a limit is refused with an error that names the file and the limit. Every limit is above the largest real file
of its kind; a file beyond it could exhaust memory or take hours.
"""

from __future__ import annotations

MIB = 1 << 20

# Bytes of config.json, an index of shards or the settings of a processor. Labels of 21,000 classes take 2 MiB, the index of 90,000 tensors 9 MiB.
JSON_BYTES = 16 * MIB
# Bytes of tokenizer.json. A vocabulary of 262,000 pieces takes 33 MiB.
TOKENIZER_BYTES = 128 * MIB
# Bytes of the header of a safetensors file, 200 per tensor. The library itself reads up to 100 MB.
SAFETENSORS_HEADER_BYTES = 16 * MIB
# Tensors of a checkpoint. The largest mixtures of experts have 90,000.
CHECKPOINT_TENSORS = 100_000
# Files of a checkpoint, which are open at the same time. The largest have 200.
CHECKPOINT_SHARDS = 1_000
# Layers of a model that is built from a config.json. A layer has about thirty objects, and the deepest models have 126 layers.
CONFIG_LAYERS = 1_000

# Bytes of a text that is read with --file. War and Peace takes 3.2 MiB.
TEXT_BYTES = 16 * MIB
# Bytes of a treebank, a GAP file or a file of pairs, after decompression. Universal Dependencies publishes no file above 100 MiB.
CORPUS_BYTES = 128 * MIB
# Sentences of a corpus. The largest treebanks have 150,000, and 600 are enough.
CORPUS_SENTENCES = 500_000
# Characters of a line of a corpus, and words of a sentence. The longest paragraphs of GAP have 2,500 characters.
CORPUS_LINE_CHARACTERS = 1_000_000
SENTENCE_WORDS = 10_000
# Bytes of an image file, and its pixels, which take up to 24 bytes each when decoded. Phone cameras have 108 million pixels.
IMAGE_BYTES = 256 * MIB
IMAGE_PIXELS = 120_000_000

# Bytes of a text after a tokenizer has normalised it. A byte that becomes a token takes up to 700 bytes of memory.
NORMALIZED_BYTES = 16 * MIB
# The factor by which normalisation may lengthen a text. One ligature grows by 11, and no real text consists of it.
NORMALIZED_GROWTH = 16
# Bytes of the output of one stage of a normalizer, and the factor by which it may grow. Each byte takes 50 bytes of memory.
NORMALIZER_STAGE_BYTES, NORMALIZER_STAGE_GROWTH = 64 * MIB, 64
# Texts may grow to this many bytes by any factor.
FREE_GROWTH_BYTES = 1 << 18
# Consecutive normalizers, pre-tokenizers, post-processors or decoders of a tokenizer. Real ones have up to a dozen.
TOKENIZER_STAGES = 64
# Seconds to tokenize a text where the file has regular expressions, and seconds added per MiB of text. A MiB takes 3 seconds.
TOKENIZE_SECONDS, TOKENIZE_SECONDS_PER_MIB = 10.0, 20.0
# Special tokens that a template adds around a text. Real ones add up to three.
TEMPLATE_TOKENS = 1_000
# Characters of all added tokens. 65,000 tokens of a speech model have 0.7 million, and a million takes two seconds to load.
ADDED_TOKEN_CHARACTERS = 4_000_000
# Characters of a piece of a Unigram model: the time per letter is their square. SentencePiece makes pieces of up to 16 by default.
UNIGRAM_PIECE_CHARACTERS = 256
# Characters of the longest word that WordPiece looks up: the time is their cube. BERT uses 100.
WORDPIECE_WORD_CHARACTERS = 500
# Characters of the prefix or suffix of pieces, such as ## or </w>.
AFFIX_CHARACTERS = 64
