"""The benchmarked models, and the workloads that are run on them.

All models have random weights; nothing is downloaded. Models of Transformers are built from their
config, the others are written by hand. Tiny models keep the structure and shrink the sizes, for
machines without a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch
from torch import nn

from . import batches
from .batches import Batch, Sizes
from .text import EOS, PAD, TOKENS, Text
from .written import DLRM, DiT, GatedDecoder, MetaLlama, NanoGPT

__all__ = [
    "MODELS",
    "MODES",
    "TRAINING",
    "Model",
    "Workload",
    "loss_workloads",
    "named",
    "workloads",
]

TRAINING = ("train", "train_bf16", "lora")
MODES = (*TRAINING, "generate", "infer", "prefill", "decode")  # in the order of measuring


@dataclass(frozen=True)
class Model:
    """An architecture at its usual size.

    Attributes:
        cls: the name of its class in Transformers, or a class that is written by hand.
        config: the name of its config's class in Transformers. None if ``cls`` is written by hand:
            such a class takes the options itself.
        options: the arguments that differ from their defaults.
        tiny: the options of the tiny model, added to ``options``.
        batch: returns inputs with labels, for a text and sizes.
        sizes: the input sizes to train and to infer with, the most important first. Sizes begin
            with the batch size; ``batch`` reads the others: sequence lengths, an image's shape, or
            the number of tables.
        tiny_sizes: the input sizes of the tiny model.
        loss_sizes: the input sizes of the short trainings that compare losses; empty if there are
            none.
        prompts: the number of prompts to continue, their length, and the number of new tokens; None
            if the model does not generate.
        prefills: the number of prompts to compute, and their length, the most important first. Empty
            if that is not measured.
        caches: the number of sequences, and the places of their static cache, to generate one token
            of each; the most important first. Empty if that is not measured.
        trains: whether training steps are measured.
        in_bf16: whether training steps with bf16 weights, and with LoRA on them, are measured.
        decodes: whether the model has an encoder and a decoder. Without labels it then needs the
            decoder's inputs.
        cost: how long it compiles, as a multiple of the usual time.
    """

    cls: str | type[nn.Module]
    config: str | None
    options: dict[str, Any]
    tiny: dict[str, Any]
    batch: Callable[[Text, Sizes], Batch]
    sizes: tuple[Sizes, ...]
    tiny_sizes: Sizes
    loss_sizes: Sizes = ()
    prompts: Sizes | None = None
    prefills: tuple[Sizes, ...] = ()
    caches: tuple[Sizes, ...] = ()
    trains: bool = True
    in_bf16: bool = False
    decodes: bool = False
    cost: float = 1.0


@dataclass(frozen=True)
class Workload:
    """A model, the mode it runs in (one of `MODES`, or "loss"), and the sizes of the inputs.

    Attributes:
        registry: the Python module whose ``MODELS`` has the model. It is a name, so that other
            processes can load the model: functions that draw batches cannot be sent to them.
        layers: the number of layers; 0 for all. A model without layers ignores it.
    """

    name: str
    mode: str
    sizes: Sizes
    tiny: bool = False
    registry: str = __name__
    layers: int = 0

    @property
    def model(self) -> Model:
        """The architecture."""
        model: Model = import_module(self.registry).MODELS[self.name]
        return model

    @property
    def shape(self) -> str:
        """The sizes as the results name them, such as ``16x1024``.

        The number of the decoder's tokens, or of new ones, comes after a plus: ``16x512+128``.
        """
        if self.mode == "generate" or self.model.decodes:
            count, length, target = self.sizes
            return f"{count}x{length}+{target}"
        return "x".join(map(str, self.sizes))

    def build(self, device: torch.device, seed: int = 0) -> nn.Module:
        """Returns the model, with weights that the seed determines.

        It is in training mode for training, and otherwise in evaluation mode. The weights are fp32
        in the modes "train" and "loss", and bf16 in the others. Adapters of LoRA are fp32.
        """
        torch.manual_seed(seed)
        with device:
            model = self._new_model()
        if self.mode in ("train", "loss"):
            return model.to(device).train()
        model.to(device, torch.bfloat16)
        if self.mode == "lora":
            _add_adapters(model)
        return model.train(self.mode in TRAINING)

    def _new_model(self) -> nn.Module:
        options = self.model.options | (self.model.tiny if self.tiny else {})
        if self.layers:
            options |= dict.fromkeys(_NAMES_OF_LAYERS & self.model.tiny.keys(), self.layers)
        if not isinstance(self.model.cls, str):
            return self.model.cls(**options)
        import transformers

        config = getattr(transformers, str(self.model.config))(**options)
        if hasattr(config, "use_cache"):
            # In the other modes nothing reads the keys and values that a forward returns.
            config.use_cache = self.mode in ("generate", "decode")
        model: nn.Module = getattr(transformers, self.model.cls)(config)
        return model

    def batch(self, text: Text) -> dict[str, Any]:
        """Returns the arguments of a call, or of ``generate``."""
        if self.mode == "generate":
            count, length, _ = self.sizes
            prompts = text.tokens(count, length)
            return {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        if self.mode == "decode":
            return {"input_ids": text.tokens(self.sizes[0], 1)}
        if self.mode == "prefill":
            # Only the last logits select a token.
            return {"input_ids": text.tokens(*self.sizes), "logits_to_keep": 1}
        batch = self.model.batch(text, self.sizes)
        if self.mode != "infer":
            return batch
        # With labels a model would compute a loss.
        labels = batch.pop("labels", None)
        for name, value in batch.items():
            if value.is_floating_point():
                batch[name] = value.bfloat16()
        if self.model.decodes and labels is not None:
            batch["decoder_input_ids"] = labels
        return batch

    def __str__(self) -> str:
        return f"{self.name} {self.mode} {self.shape}"


def _add_adapters(model: nn.Module) -> None:
    """Adds adapters of LoRA to all linear layers of the blocks, and freezes all other weights."""
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=16, target_modules="all-linear"), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # as `get_peft_model` does


# The options for the number of layers. A tiny model has few.
_NAMES_OF_LAYERS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"}
_SPECIAL = {"pad_token_id": PAD, "eos_token_id": EOS}
_TINY_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TINY_GROUPS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_TINY_PROMPTS = (2, 8, 6)  # see `Model.prompts`
_TINY_CACHE = (2, 8)  # see `Model.caches`
_PREFILLS, _CACHES = ((1, 2048), (64, 512)), ((1, 2048), (64, 2048))

_LLAMA = _SPECIAL | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

MODELS = {
    "bert": Model(
        cls="BertForMaskedLM",
        config="BertConfig",
        options=_SPECIAL,
        tiny={"vocab_size": TOKENS, **_TINY_SIZES},
        batch=batches.masked,
        sizes=((32, 512), (64, 512), (32, 128)),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "gpt2": Model(
        cls="GPT2LMHeadModel",
        config="GPT2Config",
        options=_SPECIAL | {"bos_token_id": EOS},
        tiny={"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2},
        batch=batches.next_token,
        sizes=((16, 1024),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
        prompts=(256, 64, 64),
    ),
    "t5": Model(
        cls="T5ForConditionalGeneration",
        config="T5Config",
        options=_SPECIAL
        | {
            "decoder_start_token_id": PAD,
            "d_model": 768,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
        },
        tiny={
            "vocab_size": TOKENS,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
        },
        batch=batches.continuation,
        sizes=((16, 512, 128),),
        tiny_sizes=(2, 16, 8),
        loss_sizes=(8, 128, 64),
        prompts=(256, 64, 64),
        decodes=True,
    ),
    # Llama 3.2 1B, with the vocabulary of the first Llamas.
    "llama": Model(
        cls="LlamaForCausalLM",
        config="LlamaConfig",
        options=_LLAMA | {"vocab_size": 32_000},
        tiny={"vocab_size": TOKENS, **_TINY_SIZES, **_TINY_GROUPS},
        batch=batches.next_token,
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    # The same with the vocabulary of Llama 3.2.
    "llama_1b": Model(
        cls="LlamaForCausalLM",
        config="LlamaConfig",
        options=_LLAMA | {"vocab_size": 128_256},
        tiny={"vocab_size": TOKENS, **_TINY_SIZES, **_TINY_GROUPS},
        batch=batches.next_token,
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
        in_bf16=True,
        prefills=_PREFILLS,
        caches=_CACHES,
    ),
    # A quarter of the layers of Llama 3.1 8B, for inference.
    "llama_8b": Model(
        cls="LlamaForCausalLM",
        config="LlamaConfig",
        options=_LLAMA
        | {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 8,
            "tie_word_embeddings": False,
        },
        tiny={"vocab_size": TOKENS, **_TINY_SIZES, **_TINY_GROUPS},
        batch=batches.next_token,
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        prefills=_PREFILLS,
        caches=_CACHES,
        trains=False,
    ),
    # Its config's default is no dropout; it was trained with 0.1.
    "vit": Model(
        cls="ViTForImageClassification",
        config="ViTConfig",
        options={"num_labels": 1000, "hidden_dropout_prob": 0.1},
        tiny={"image_size": 32, **_TINY_SIZES},
        batch=batches.picture,
        sizes=((128, 3, 224, 224),),
        tiny_sizes=(2, 3, 32, 32),
        loss_sizes=(8, 3, 224, 224),
    ),
    # Qwen3 0.6B: queries and keys are normalised.
    "qwen3": Model(
        cls="Qwen3ForCausalLM",
        config="Qwen3Config",
        options=_SPECIAL
        | {
            "bos_token_id": EOS,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
        tiny={"vocab_size": TOKENS, **_TINY_SIZES, **_TINY_GROUPS, "head_dim": 16},
        batch=batches.next_token,
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    # Half of the layers of Gemma 2 2B. Its attention has a soft cap, which
    # `scaled_dot_product_attention` lacks. Older releases of Transformers apply the cap only with
    # "eager".
    "gemma2": Model(
        cls="Gemma2ForCausalLM",
        config="Gemma2Config",
        options=_SPECIAL
        | {
            "bos_token_id": EOS,
            "vocab_size": 256_000,
            "num_hidden_layers": 13,
            "attn_implementation": "eager",
            "final_logit_softcapping": 30.0,
        },
        tiny={
            "vocab_size": TOKENS,
            **_TINY_SIZES,
            **_TINY_GROUPS,
            "head_dim": 16,
            "sliding_window": 8,
        },
        batch=batches.next_token,
        sizes=((2, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(4, 128),
    ),
    # Eight experts, two for each token, as in Mixtral 8x7B, at a quarter of its width and of its
    # layers.
    "mixtral": Model(
        cls="MixtralForCausalLM",
        config="MixtralConfig",
        options=_SPECIAL
        | {
            "bos_token_id": EOS,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        tiny={"vocab_size": TOKENS, **_TINY_SIZES, **_TINY_GROUPS, "head_dim": 16},
        batch=batches.next_token,
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "dit": Model(
        cls=DiT,
        config=None,
        options={},
        tiny={"input_size": 8, "hidden_size": 32, "depth": 2, "num_heads": 2},
        batch=batches.noisy,
        sizes=((32, 256),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 256),
    ),
    "nanogpt": Model(
        cls=NanoGPT,
        config=None,
        options={},
        tiny={"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2},
        batch=batches.shifted("idx"),
        sizes=((16, 1024),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "meta_llama": Model(
        cls=MetaLlama,
        config=None,
        options={},
        tiny={
            "vocab_size": TOKENS,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "n_kv_heads": 2,
            "hidden_dim": 64,
        },
        batch=batches.shifted("tokens"),
        sizes=((4, 2048),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "gated_decoder": Model(
        cls=GatedDecoder,
        config=None,
        options={},
        tiny={"vocab_size": TOKENS, "dim": 32, "n_layers": 2, "n_heads": 2},
        batch=batches.shifted("tokens"),
        sizes=((8, 1024),),
        tiny_sizes=(2, 16),
        loss_sizes=(8, 128),
    ),
    "dlrm": Model(
        cls=DLRM,
        config=None,
        options={"rows": batches.TABLE_ROWS, "dense_features": batches.DENSE_FEATURES},
        tiny={"widths": (16, 24, 8, 16, 40), "bottom": (32, 16), "top": (32,)},
        batch=batches.clicks,
        sizes=((16384, 26), (2048, 26)),
        tiny_sizes=(6, 5),
        loss_sizes=(2048, 26),
    ),
}


def workloads(
    models: Sequence[str] = (), modes: Sequence[str] = (), *, tiny: bool = False
) -> list[Workload]:
    """Returns the workloads of the named models and modes; of all if none are named.

    They are in the order of `MODES`. In each mode, the most important sizes of all models come
    first.
    """
    chosen = [named("model", name, MODELS) for name in models] or list(MODELS)
    wanted = [named("mode", mode, MODES) for mode in modes] or MODES
    ranked = []
    for name, mode in itertools.product(chosen, wanted):
        for rank, sizes in enumerate(_sizes(name, mode, tiny=tiny)):
            ranked.append((MODES.index(mode), rank, Workload(name, mode, sizes, tiny)))
    return [workload for *_, workload in sorted(ranked, key=lambda entry: entry[:2])]


def loss_workloads(models: Sequence[str] = (), *, tiny: bool = False) -> list[Workload]:
    """Returns the short trainings of the named models, or of all: they compare losses."""
    chosen = [named("model", name, MODELS) for name in models] or list(MODELS)
    result = []
    for name in filter(lambda name: MODELS[name].trains, chosen):
        sizes = MODELS[name].tiny_sizes if tiny else MODELS[name].loss_sizes
        result.append(Workload(name, "loss", sizes, tiny))
    return result


def named(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns the name if it is known.

    Raises:
        ValueError: the name is not known. The message contains ``kind``, such as "model", and
            suggests similar names.
    """
    names = list(known)
    if name in names:
        return name
    near = get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}"
    raise ValueError(f"no {kind} {name!r}; {hint}")


def _sizes(name: str, mode: str, *, tiny: bool) -> tuple[Sizes, ...]:
    """Returns the input sizes of a model in a mode."""
    model = MODELS[name]
    sizes, tiny_sizes = model.sizes, model.tiny_sizes
    if mode == "generate":
        sizes, tiny_sizes = (model.prompts,) if model.prompts else (), _TINY_PROMPTS
    elif mode == "prefill":
        sizes = model.prefills
    elif mode == "decode":
        sizes, tiny_sizes = model.caches, _TINY_CACHE
    elif mode in TRAINING and not (model.trains if mode == "train" else model.in_bf16):
        sizes = ()
    return (tiny_sizes,) if tiny and sizes else sizes
