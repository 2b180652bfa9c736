"""How much is read of files that come from elsewhere: each limit with its reason, all in one place.

What goes beyond a limit is refused with an error that names the file and the limit. Each leaves room for the largest real file
of its kind; what it keeps out would take all memory, or hours.
"""

from __future__ import annotations

MIB = 1 << 20

# config.json, an index of shards, a processor's settings. Labels of 21,000 classes take 2 MiB, the index of 90,000 tensors 9.
JSON_BYTES = 16 * MIB
# tokenizer.json: a vocabulary of 262,000 pieces takes 33 MiB
TOKENIZER_BYTES = 128 * MIB
# The header of one safetensors file: 200 bytes describe a tensor. The library itself would read 100 MB.
HEADER_BYTES = 16 * MIB
# tensors of a checkpoint: the largest mixtures of experts have 90,000
TENSORS = 100_000
# Files of a checkpoint, which are open at once. The largest have 200.
SHARDS = 1_000
# layers of a model that is built from a config.json: a layer is some thirty objects, and the deepest models have 126
LAYERS = 1_000

# A text that is read with --file. War and Peace takes 3.2 MiB.
TEXT_BYTES = 16 * MIB
# A treebank, a GAP file or pairs, after decompression. Universal Dependencies publishes no file above 100 MiB.
CORPUS_BYTES = 128 * MIB
# Sentences of it: the largest treebanks have 150,000, and 600 are enough.
SENTENCES = 500_000
# characters of a line of it, and words of a sentence: the longest paragraphs of GAP have 2,500 characters
LINE_CHARACTERS = 1_000_000
SENTENCE_WORDS = 10_000
# An image file, and its pixels, each of which takes up to 24 bytes once it is decoded. Cameras of telephones have 108 million.
IMAGE_BYTES = 256 * MIB
IMAGE_PIXELS = 120_000_000

# Bytes of a text once a tokenizer has normalised it. As a token of its own each takes up to 700 bytes of memory.
NORMALIZED_BYTES = 16 * MIB
# How many times longer a text may become by it. One ligature takes 11 times the bytes, and no real text consists of it.
GROWTH = 16
# Bytes that one stage of a normalizer may make of a text at the most, and how many times as many as it had: 50 bytes of memory for each.
STAGE_BYTES, STAGE_GROWTH = 64 * MIB, 64
# A text that is no longer than this may become so by any growth.
SMALL_BYTES = 1 << 18
# normalizers, pre-tokenizers, post-processors or decoders of a tokenizer, one after the other: real ones have up to a dozen
STAGES = 64
# What reading a text may take where the file brings regular expressions, and what each MiB of it adds. Reading one takes 3 seconds.
SECONDS, SECONDS_PER_MIB = 10.0, 20.0
# special tokens that a template puts around a text: real ones put up to three
TEMPLATE_TOKENS = 1_000
# characters of all added tokens: 65,000 tokens of a speech model take 0.7 million, and a million takes two seconds to load
ADDED_CHARACTERS = 4_000_000
# Pieces of a Unigram model: time is their length squared for each letter. SentencePiece makes none beyond 16 unless told to.
UNIGRAM_PIECE = 256
# The longest word that WordPiece looks up: time is its length cubed. BERT says 100.
WORDPIECE_WORD = 500
# what a model puts before or after pieces, such as ## or </w>
AFFIX = 64
