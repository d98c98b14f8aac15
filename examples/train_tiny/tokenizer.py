"""The tiny model's tokenizer: byte-level BPE of 2,048 entries with single digits.

`python -m examples.train_tiny.tokenizer` trains it on the corpus, saves it in Hugging Face layout
and writes the tokenized corpus. The chat template puts a system message (the context) first and
bare, so a conversation reads: context, user, question, assistant, answer, eos.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.train_tiny import corpus

ASSETS = Path(__file__).parents[2] / "assets" / "tiny-sdar"
VOCABULARY = 2048
SPECIAL = ["<|pad|>", "<|eos|>", "<|mask|>", "<|user|>", "<|assistant|>"]
PAD, EOS, MASK, USER, ASSISTANT = range(5)

# Questions and answers start with a space, so that their words are the tokens used in running text.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'].strip() }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|> ' + message['content'].strip() }}"
    "{% else %}{{ '<|assistant|> ' + message['content'].strip() + '<|eos|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(texts: list[str]) -> Tokenizer:
    """Byte-level BPE trained on the texts, special tokens at ids 0 to 4."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja for AutoTokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "eos_token": SPECIAL[EOS],
        "mask_token": SPECIAL[MASK],
        "additional_special_tokens": SPECIAL[USER:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path = ASSETS) -> Tokenizer:
    """The saved tokenizer as a `tokenizers.Tokenizer`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    training_texts = [corpus.split(text)[0] for text in corpus.books().values()]
    save(train(training_texts), ASSETS)
    corpus.tokenize(load())
