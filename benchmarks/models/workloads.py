"""The models, and what is done with each.

All have random weights; nothing is downloaded. Those of Transformers are built from their config,
others are written by hand. Tiny ones keep the structure and shrink the sizes, for machines without
a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from .text import EOS, MASK, PAD, TOKENS, Text
from .written import DiT, GatedDecoder, MetaLlama, NanoGPT

__all__ = ["MODELS", "MODES", "Model", "Workload", "loss_workloads", "named", "workloads"]

MODES = ("train", "generate", "infer")  # in the order in which they are measured
Sizes = tuple[int, ...]
Batch = dict[str, Tensor]
_IGNORED = -100  # the label that Transformers' losses leave out


@dataclass(frozen=True)
class Model:
    """An architecture at its usual size.

    Attributes:
        cls: the name of its class in Transformers, or a class that is written by hand.
        config: the name of its config's class in Transformers; None of a class that takes the
            options itself.
        options: the arguments that are not its defaults; ``tiny`` those that shrink it.
        batch: inputs with labels, of given sizes.
        sizes: those of a training step and of inference, the most telling first; ``tiny_sizes`` the
            tiny model's.
        loss_sizes: those of the short training.
        prompts: how many prompts are continued, their length, and by how many tokens; None where
            nothing is generated.
    """

    cls: str | type[nn.Module]
    config: str | None
    options: dict[str, Any]
    tiny: dict[str, Any]
    batch: Callable[[Text, Sizes], Batch]
    sizes: tuple[Sizes, ...]
    tiny_sizes: Sizes
    loss_sizes: Sizes
    prompts: Sizes | None = None


@dataclass(frozen=True)
class Workload:
    """A model, what is done with it, and the sizes of the inputs."""

    name: str
    mode: str
    sizes: Sizes
    tiny: bool = False

    @property
    def model(self) -> Model:
        """The architecture."""
        return MODELS[self.name]

    @property
    def shape(self) -> str:
        """The sizes as the results name them.

        A third is the decoder's, and stands behind a plus.
        """
        first, last = (self.sizes[:2], self.sizes[2:]) if len(self.sizes) == 3 else (self.sizes, ())
        return "+".join("x".join(map(str, sides)) for sides in (first, last) if sides)

    def build(self, device: torch.device, seed: int = 0) -> nn.Module:
        """The model as its mode wants it: in bf16 and evaluation mode but for training.

        Same weights for same seed.
        """
        torch.manual_seed(seed)
        with device:
            model = self._made()
        if self.mode in ("train", "loss"):
            return model.to(device).train()
        return model.to(device, torch.bfloat16).eval()

    def _made(self) -> nn.Module:
        options = self.model.options | (self.model.tiny if self.tiny else {})
        if not isinstance(self.model.cls, str):
            return self.model.cls(**options)
        import transformers

        config = getattr(transformers, str(self.model.config))(**options)
        if hasattr(config, "use_cache"):
            config.use_cache = (
                self.mode == "generate"
            )  # nothing else reads the keys and values that a forward returns
        model: nn.Module = getattr(transformers, self.model.cls)(config)
        return model

    def batch(self, text: Text) -> Batch:
        """The arguments of a call, or of ``generate``."""
        if self.mode == "generate":
            count, length, _ = self.sizes
            prompts = text.tokens(count, length)
            return {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        batch = self.model.batch(text, self.sizes)
        if self.mode != "infer":
            return batch
        # T5's decoder reads the labels' place; the others' labels would add a loss.
        labels = batch.pop("labels")
        batch = {
            name: value.bfloat16() if value.is_floating_point() else value
            for name, value in batch.items()
        }
        return batch | ({"decoder_input_ids": labels} if self.name == "t5" else {})

    def __str__(self) -> str:
        return f"{self.name} {self.mode} {self.shape}"


def _next_token(text: Text, sizes: Sizes) -> Batch:
    tokens = text.tokens(*sizes)
    return {"input_ids": tokens, "labels": tokens}  # the models shift


def _shifted(name: str) -> Callable[[Text, Sizes], Batch]:
    """The inputs under their name, and the tokens that follow them."""

    def batch(text: Text, sizes: Sizes) -> Batch:
        count, length = sizes
        tokens = text.tokens(count, length + 1)
        return {name: tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return batch


def _masked(text: Text, sizes: Sizes) -> Batch:
    tokens = text.tokens(*sizes)
    masked = text.chosen(tokens, 0.15)
    return {
        "input_ids": tokens.masked_fill(masked, MASK),
        "labels": tokens.masked_fill(~masked, _IGNORED),
    }


def _continuation(text: Text, sizes: Sizes) -> Batch:
    count, length, target = sizes
    tokens = text.tokens(count, length + target)
    return {"input_ids": tokens[:, :length].contiguous(), "labels": tokens[:, length:].contiguous()}


def _picture(text: Text, sizes: Sizes) -> Batch:
    """A window of the text as a picture's pixels; its class is the byte that follows."""
    count, *sides = sizes
    windows = text.windows(count, sides[0] * sides[1] * sides[2] + 1)
    return {
        "pixel_values": windows[:, :-1].reshape(sizes).float() / 127.5 - 1.0,
        "labels": windows[:, -1],
    }


def _noisy(text: Text, sizes: Sizes) -> Batch:
    """Windows of the text as latents, mixed with noise as far as their step says, and the noise.

    The byte is the class.
    """
    count, patches = sizes
    side = 2 * math.isqrt(patches)
    windows = text.windows(count, 4 * side * side + 1)
    latents = windows[:, :-1].reshape(count, 4, side, side).float() / 127.5 - 1.0
    noise, steps = text.noise(latents), text.steps(count, _STEPS)
    level = (steps / _STEPS).view(-1, 1, 1, 1)
    mixed = (1 - level).sqrt() * latents + level.sqrt() * noise
    return {"x": mixed, "t": steps, "y": windows[:, -1], "labels": noise}


_STEPS = 1000  # of the diffusion
_SPECIAL = {"pad_token_id": PAD, "eos_token_id": EOS}
_TINY_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TINY_GROUPS = {"num_attention_heads": 4, "num_key_value_heads": 2}

MODELS = {
    "bert": Model(
        "BertForMaskedLM",
        "BertConfig",
        _SPECIAL,
        {"vocab_size": TOKENS, **_TINY_BERT},
        _masked,
        sizes=((32, 512), (64, 512), (32, 128)),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "gpt2": Model(
        "GPT2LMHeadModel",
        "GPT2Config",
        _SPECIAL | {"bos_token_id": EOS},
        {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2},
        _next_token,
        sizes=((16, 1024),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
        prompts=(256, 64, 64),
    ),
    "t5": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        _SPECIAL
        | {
            "decoder_start_token_id": PAD,
            "d_model": 768,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
        },
        {
            "vocab_size": TOKENS,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
        },
        _continuation,
        sizes=((16, 512, 128),),
        tiny_sizes=(2, 16, 8),
        loss_sizes=(8, 128, 64),
        prompts=(256, 64, 64),
    ),
    # Llama 3.2 1B, with the vocabulary of the first Llamas.
    "llama": Model(
        "LlamaForCausalLM",
        "LlamaConfig",
        _SPECIAL
        | {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
        {"vocab_size": TOKENS, **_TINY_BERT, **_TINY_GROUPS},
        _next_token,
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    # Its config's default is no dropout; it was trained with 0.1.
    "vit": Model(
        "ViTForImageClassification",
        "ViTConfig",
        {"num_labels": 1000, "hidden_dropout_prob": 0.1},
        {"image_size": 32, **_TINY_BERT},
        _picture,
        sizes=((128, 3, 224, 224),),
        tiny_sizes=(2, 3, 32, 32),
        loss_sizes=(8, 3, 224, 224),
    ),
    # Qwen3 0.6B: queries and keys are normalised.
    "qwen3": Model(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        _SPECIAL
        | {
            "bos_token_id": EOS,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        {"vocab_size": TOKENS, **_TINY_BERT, **_TINY_GROUPS, "head_dim": 16},
        _next_token,
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    # Half of the layers of Gemma 2 2B. Its attention has a soft cap, which PyTorch's has not:
    # Transformers writes it out, in older releases where it is asked to.
    "gemma2": Model(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _SPECIAL | {"bos_token_id": EOS, "num_hidden_layers": 13, "attn_implementation": "eager"},
        {"vocab_size": TOKENS, **_TINY_BERT, **_TINY_GROUPS, "head_dim": 16, "sliding_window": 8},
        _next_token,
        sizes=((2, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(4, 128),
    ),
    # Eight experts, of which each token takes two, as in Mixtral 8x7B, at a quarter of its width
    # and of its layers.
    "mixtral": Model(
        "MixtralForCausalLM",
        "MixtralConfig",
        _SPECIAL
        | {
            "bos_token_id": EOS,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        {"vocab_size": TOKENS, **_TINY_BERT, **_TINY_GROUPS, "head_dim": 16},
        _next_token,
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "dit": Model(
        DiT,
        None,
        {},
        {"input_size": 8, "hidden_size": 32, "depth": 2, "num_heads": 2},
        _noisy,
        sizes=((32, 256),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 256),
    ),
    "nanogpt": Model(
        NanoGPT,
        None,
        {},
        {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2},
        _shifted("idx"),
        sizes=((16, 1024),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "meta_llama": Model(
        MetaLlama,
        None,
        {},
        {
            "vocab_size": TOKENS,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "n_kv_heads": 2,
            "hidden_dim": 64,
        },
        _shifted("tokens"),
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "gated_decoder": Model(
        GatedDecoder,
        None,
        {},
        {"vocab_size": TOKENS, "dim": 32, "n_layers": 2, "n_heads": 2},
        _shifted("tokens"),
        sizes=((8, 1024),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
}


def workloads(
    models: Sequence[str] = (), modes: Sequence[str] = (), *, tiny: bool = False
) -> list[Workload]:
    """Those of the named models and modes, or of all, the most telling first."""
    chosen = [named("model", name, MODELS) for name in models] or list(MODELS)
    wanted = [named("mode", mode, MODES) for mode in modes] or MODES
    found = [
        (MODES.index(mode), rank, Workload(name, mode, sizes, tiny))
        for name in chosen
        for mode in wanted
        for rank, sizes in enumerate(_sizes(name, mode, tiny))
    ]
    return [workload for *_, workload in sorted(found, key=lambda entry: entry[:2])]


def loss_workloads(models: Sequence[str] = (), *, tiny: bool = False) -> list[Workload]:
    """The short trainings."""
    chosen = [named("model", name, MODELS) for name in models] or list(MODELS)
    sizes = {name: MODELS[name].tiny_sizes if tiny else MODELS[name].loss_sizes for name in chosen}
    return [Workload(name, "loss", sizes[name], tiny) for name in chosen]


def named(what: str, name: str, known: Iterable[str]) -> str:
    """The name, if it is known.

    Raises:
        ValueError: it is not; the message has the nearest that are.
    """
    names = list(known)
    if name in names:
        return name
    near = get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}"
    raise ValueError(f"no {what} {name!r}; {hint}")


def _sizes(name: str, mode: str, tiny: bool) -> tuple[Sizes, ...]:
    model = MODELS[name]
    if mode != "generate":
        return (model.tiny_sizes,) if tiny else model.sizes
    if model.prompts is None:
        return ()
    return ((2, 8, 6),) if tiny else (model.prompts,)
