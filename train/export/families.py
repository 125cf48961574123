"""The model families of Hugging Face that our model can hold: names of their parameters, and their config.json.

One table for each family serves both directions. A parameter of ours is a whole tensor of theirs, its transpose, or a
part of it: GPT-2 stores matrices transposed, and queries, keys and values as one matrix. No number is changed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import ConfigError, ContractError
from train.model.shape import LLAMA_TURNS, ModelShape

Config = Mapping[str, Any]


@dataclass(frozen=True)
class StoredPlace:
    """The place of a parameter in the weights of a family."""

    name: str
    """Name of the module there; of the parameter in the result of `places_of`."""
    is_transposed: bool = False
    """True if matrices are stored as (inputs, outputs)."""
    part: int = 0
    """Number of the part that the parameter is, along the outputs."""
    num_parts: int = 1
    """Number of parameters of ours in one of theirs."""


@dataclass(frozen=True)
class Family:
    """A family of models: what its shapes have in common, the names of its parameters and its configuration."""

    model_type: str
    architecture: str
    """Class of `transformers`."""
    fixed: Mapping[str, Any]
    """Fields of our shape that are the same for the whole family."""
    outside: Mapping[str, StoredPlace]
    """StoredPlace of each module of ours outside of the layers."""
    layers: str
    """Name of the list of layers."""
    inside: Mapping[str, StoredPlace]
    """StoredPlace of each module of ours in a layer, below the layer."""
    keys: Mapping[str, str]
    """Keys of config.json whose value is a field of our shape, and that field."""
    write: Callable[[ModelShape, int], dict[str, Any]]
    """Function of (shape, sequence length) to the further keys of config.json."""
    defaults: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Function of config.json to the fields of our shape whose keys are missing or null in it."""
    read: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Function of config.json to the further fields of our shape."""
    conditions: Callable[[Config], Iterator[tuple[bool, str]]] = lambda config: iter(())
    """Function of config.json to pairs (our model does not support it, text of the key and its value)."""
    no_parameters: str = r"(?!)"
    """Pattern of names in files that are no parameters of the model, such as buffers."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors in files that are copies of parameters, and these parameters."""
    optional_prefix: str = ""
    """Beginning of names that some files leave out."""
    objectives: tuple[str, ...] = ("causal", "span")
    """Training objectives of models whose attention is that of the family."""
    is_square: bool = False
    """True if each head has its own key, and all heads together the width of the model."""
    heads_divide_width: bool = False
    """True if `transformers` loads only models whose width is a multiple of the number of heads."""
    head: StoredPlace = field(default_factory=lambda: StoredPlace("lm_head"))
    """StoredPlace of the output matrix, if it is not the embedding."""


def family_of(shape: ModelShape) -> Family:
    """Return the family that holds models of this shape. Raises ConfigError, with the nearest one, if none does."""
    problems = {name: [*_beyond(family, shape)] for name, family in FAMILIES.items()}
    nearest = min(problems, key=lambda name: len(problems[name]))
    if problems[nearest]:
        raise ConfigError(
            f"export: expected a model shape that {FAMILIES[nearest].architecture} supports, got "
            f"{'; '.join(problems[nearest])}. Use the checkpoint in its own format."
        )
    return FAMILIES[nearest]


def _beyond(family: Family, shape: ModelShape) -> Iterator[str]:
    """Yield the fields of a shape that a family does not have."""
    for name, value in family.fixed.items():
        if (own := getattr(shape, name)) != value:
            yield f"{name} = {str(own).lower() if isinstance(own, bool) else own}"
    if family.heads_divide_width and shape.d_model % shape.num_heads:
        yield f"num_heads = {shape.num_heads}, which does not divide d_model = {shape.d_model}"
    if family.is_square and shape.num_kv_heads != shape.num_heads:
        yield f"num_kv_heads = {shape.num_kv_heads}"
    if family.is_square and shape.query_width != shape.d_model:
        yield f"num_heads · head_dim = {shape.query_width}"


def places_of(family: Family, names: Iterator[str]) -> dict[str, StoredPlace]:
    """Return the place of each parameter of ours, with the full name there. `names`: names of our parameters."""
    placed = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        if module.startswith("blocks."):
            _, layer, inner = module.split(".", 2)
            place, begin = family.inside[inner], f"{family.layers}.{layer}."
        else:
            place, begin = family.head if module == "head" else family.outside[module], ""
        kind = "bias" if kind == "output_bias" else kind
        is_transposed = place.is_transposed and kind == "weight"
        placed[name] = StoredPlace(f"{begin}{place.name}.{kind}", is_transposed, place.part, place.num_parts)
    return placed


def copies_in(family: Family, shape: ModelShape) -> dict[str, str]:
    """Return the names of tensors that are copies of parameters in a model of this shape, and these parameters."""
    head, embedding = (f"{place.name}.weight" for place in (family.head, family.outside["embedding"]))
    return {**family.copies, **({head: embedding} if shape.tie_embeddings else {})}


def name_there(family: Family, name: str) -> str | None:
    """Return the name of a parameter in a file as the table has it; None if it is no parameter of the model."""
    if family.optional_prefix and not name.startswith((family.optional_prefix, family.head.name)):
        name = family.optional_prefix + name
    if re.fullmatch(family.no_parameters, name):
        return None
    # The names that the first version of BERT gave to the gains and biases of norms.
    return re.sub(r"\.LayerNorm\.(gamma|beta)$", lambda match: f".LayerNorm.{OLD_NAMES[match[1]]}", name)


OLD_NAMES = {"gamma": "weight", "beta": "bias"}


def shape_of_config(config: Config, where: str) -> tuple[Family, ModelShape]:
    """Return the family of the model that a config.json describes, and its shape; `where`: its path.

    Raises ConfigError if our model does not support it, ContractError if a value is missing or of a wrong type.
    """
    family = FAMILIES.get(str(config.get("model_type")), FAMILIES["llama"])
    try:
        known = config.get("model_type") in FAMILIES
        problems = [] if known else [f"model_type = {config.get('model_type')}"]
        problems += ["quantization_config"] if config.get("quantization_config") else []
        problems += [text for is_wrong, text in family.conditions(config) if is_wrong]
        if problems:
            raise ConfigError(
                f"{where}: expected a supported {'model of ' + ', '.join(FAMILIES) if not known else family.model_type}"
                f"{'' if not known else ' model'}, got {'; '.join(problems)}. Import a model without these settings."
            )
        given = {ours: config[key] for key, ours in family.keys.items() if config.get(key) is not None}
        fields = family.defaults(config) | given | family.read(config)
        return family, ModelShape.model_validate({**family.fixed, **fields})
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ContractError(
            f"{where}: expected the complete configuration of a {family.model_type} model, got a missing or invalid "
            f"key: {error}. Download config.json again."
        ) from error


# Llama and Qwen 3: rotary positions, RMSNorm, a gated feed-forward; Qwen 3 also normalizes queries and keys.


def _rope_of(shape: ModelShape) -> dict[str, Any] | None:
    if shape.rope_scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
    if shape.rope_scaling == "llama3":
        low, high = LLAMA_TURNS
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
        scaling |= {"original_max_position_embeddings": shape.rope_original}
    return scaling


def _write_llama(shape: ModelShape, seq_len: int) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rope_scaling": _rope_of(shape),
        "attention_bias": shape.bias,
        **({} if shape.qk_norm else {"mlp_bias": shape.bias}),
    }


def _rope_in(config: Config) -> dict[str, Any]:
    # Older versions of `transformers` wrote `rope_theta` and `rope_scaling` instead of `rope_parameters`.
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10_000.0)} | given
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}


def _llama_conditions(config: Config) -> Iterator[tuple[bool, str]]:
    rope = _rope_in(config)
    kind, turns = rope["rope_type"], (rope.get("low_freq_factor"), rope.get("high_freq_factor"))
    yield config.get("hidden_act", "silu") != "silu", f"hidden_act = {config.get('hidden_act')}"
    yield kind not in ("default", "linear", "llama3"), f"rope_type = {kind}"
    yield kind == "llama3" and turns != LLAMA_TURNS, f"low and high_freq_factor = {turns}"
    both = [own for name in ("rope_parameters", "rope_scaling") if (own := config.get(name))]
    yield both[1:] != both[:1] and len(both) == 2, "rope_parameters and rope_scaling that differ"
    yield any(isinstance(value, Mapping) for value in rope.values()), "rope_parameters by kind of layer"
    yield not config.get("is_causal", True), "is_causal = false"
    if config.get("model_type") == "qwen3":
        others = {*(config.get("layer_types") or ())} - {"full_attention"}
        yield bool(others), f"layer_types = {', '.join(map(str, sorted(others, key=str)))}"
        yield bool(config.get("attention_bias", False)), "attention_bias = true"
        yield bool(config.get("use_sliding_window", False)), "use_sliding_window = true"
    else:
        bias = bool(config.get("attention_bias", False))
        yield bool(config.get("mlp_bias", False)) != bias, "attention_bias and mlp_bias that differ"


def _llama_defaults(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "num_kv_heads": heads,
        "head_dim": 128 if config.get("model_type") == "qwen3" else config["hidden_size"] // heads,
        "norm_eps": 1e-6,
        "tie_embeddings": False,
    }


def _read_llama(config: Config) -> dict[str, Any]:
    rope = _rope_in(config)
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings", 8192)
    if kind == "llama3":  # the order in which `transformers` looks for it
        places = (config.get("original_max_position_embeddings"), rope.get("original_max_position_embeddings"))
        original = next((own for own in places if own is not None), None) or config["max_position_embeddings"]
    return {
        "bias": bool(config.get("attention_bias", False)),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": "none" if kind == "default" else kind,
        "rope_factor": rope.get("factor", 1.0) if kind == "default" else rope["factor"],
        "rope_original": original,
    }


# GPT-2 and BERT: learned positions, LayerNorm, GELU, biases.


def _square_heads(width: str, heads: str) -> Callable[[Config], dict[str, Any]]:
    """Return a function to the fields of attention in which each head has its own key; arguments are keys."""
    return lambda config: {"num_kv_heads": config[heads], "head_dim": config[width] // config[heads]}


def _write_gpt2(shape: ModelShape, seq_len: int) -> dict[str, Any]:
    return {"activation_function": "gelu_new", **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}


def _gpt2_conditions(config: Config) -> Iterator[tuple[bool, str]]:
    activation = config.get("activation_function", "gelu_new")
    yield activation not in ("gelu_new", "gelu_pytorch_tanh"), f"activation_function = {activation}"
    for name, supported in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        yield bool(config.get(name, supported)) != supported, f"{name} = {str(not supported).lower()}"
    yield bool(config.get("add_cross_attention", False)), "add_cross_attention = true"
    yield not config.get("is_causal", True), "is_causal = false"


def _write_bert(shape: ModelShape, seq_len: int) -> dict[str, Any]:
    return {"hidden_act": "gelu", **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)}


def _bert_conditions(config: Config) -> Iterator[tuple[bool, str]]:
    yield config.get("hidden_act", "gelu") != "gelu", f"hidden_act = {config.get('hidden_act')}"
    kind = config.get("position_embedding_type", "absolute")
    yield kind != "absolute", f"position_embedding_type = {kind}"
    for name in ("is_decoder", "is_causal"):
        yield bool(config.get(name, False)), f"{name} = true"
    yield not config.get("tie_word_embeddings", True), "tie_word_embeddings = false"


def _places(**names: str) -> dict[str, StoredPlace]:
    """Return places by module; in keywords, two underscores stand for the dot of a name."""
    return {module.replace("__", "."): StoredPlace(name) for module, name in names.items()}


PLAIN = {
    **{"value_embeddings": 0, "residual_mixing": False, "window": None, "logit_softcap": None},
    **{"width_multiplier": 1.0, "query_scale": 1.0},
}
"""Fields that no family has."""
ROTARY = PLAIN | {
    **{"norm": "rmsnorm", "norm_position": "pre", "positions": "rope", "max_positions": 0, "num_token_types": 0},
    **{"head_transform": False, "activation": "swiglu"},
}
BOTH = {"vocab_size": "vocab_size", "tie_word_embeddings": "tie_embeddings"}
"""Keys of every family."""
LLAMA_KEYS = BOTH | {
    "hidden_size": "d_model",
    "intermediate_size": "d_ffw",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
LLAMA_OUTSIDE = _places(embedding="model.embed_tokens", norm="model.norm")
LLAMA_INSIDE = _places(
    attention_norm="input_layernorm",
    attention__query="self_attn.q_proj",
    attention__key="self_attn.k_proj",
    attention__value="self_attn.v_proj",
    attention__query_norm="self_attn.q_norm",
    attention__key_norm="self_attn.k_norm",
    attention__out="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    ffn__gate="mlp.gate_proj",
    ffn__up="mlp.up_proj",
    ffn__down="mlp.down_proj",
)
LEARNED = PLAIN | {"norm": "layernorm", "positions": "learned", "bias": True, "qk_norm": False}
GPT2_KEYS = BOTH | {
    **{"n_embd": "d_model", "n_inner": "d_ffw", "n_layer": "num_layers", "n_head": "num_heads"},
    **{"n_positions": "max_positions", "layer_norm_epsilon": "norm_eps"},
}
BERT_KEYS = BOTH | {
    **{"hidden_size": "d_model", "intermediate_size": "d_ffw", "num_hidden_layers": "num_layers"},
    **{"num_attention_heads": "num_heads", "max_position_embeddings": "max_positions"},
    **{"type_vocab_size": "num_token_types", "layer_norm_eps": "norm_eps"},
}
GPT2_INSIDE = {
    **_places(attention_norm="ln_1", ffn_norm="ln_2"),
    **{
        f"attention.{name}": StoredPlace("attn.c_attn", is_transposed=True, part=part, num_parts=3)
        for part, name in enumerate(("query", "key", "value"))
    },
    "attention.out": StoredPlace("attn.c_proj", is_transposed=True),
    "ffn.up": StoredPlace("mlp.c_fc", is_transposed=True),
    "ffn.down": StoredPlace("mlp.c_proj", is_transposed=True),
}
FAMILIES = {
    "llama": Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        fixed=ROTARY | {"qk_norm": False},
        outside=LLAMA_OUTSIDE,
        layers="model.layers",
        inside=LLAMA_INSIDE,
        keys=LLAMA_KEYS,
        write=_write_llama,
        defaults=_llama_defaults,
        read=_read_llama,
        conditions=_llama_conditions,
        no_parameters=r".*rotary_emb\.inv_freq",
        heads_divide_width=True,
    ),
    "qwen3": Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed=ROTARY | {"qk_norm": True, "bias": False},
        outside=LLAMA_OUTSIDE,
        layers="model.layers",
        inside=LLAMA_INSIDE,
        keys=LLAMA_KEYS,
        write=_write_llama,
        defaults=_llama_defaults,
        read=_read_llama,
        conditions=_llama_conditions,
    ),
    "gpt2": Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        fixed=LEARNED
        | {"norm_position": "pre", "activation": "gelu_tanh", "num_token_types": 0, "head_transform": False},
        outside=_places(embedding="transformer.wte", extra__positions="transformer.wpe", norm="transformer.ln_f"),
        layers="transformer.h",
        inside=GPT2_INSIDE,
        keys=GPT2_KEYS,
        write=_write_gpt2,
        defaults=lambda config: {"d_ffw": 4 * config["n_embd"], "norm_eps": 1e-5, "tie_embeddings": True},
        read=_square_heads("n_embd", "n_head"),
        conditions=_gpt2_conditions,
        no_parameters=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
        optional_prefix="transformer.",
        is_square=True,
    ),
    "bert": Family(
        model_type="bert",
        architecture="BertForMaskedLM",
        fixed=LEARNED | {"norm_position": "post", "activation": "gelu", "head_transform": True, "tie_embeddings": True},
        outside=_places(
            embedding="bert.embeddings.word_embeddings",
            extra__positions="bert.embeddings.position_embeddings",
            extra__types="bert.embeddings.token_type_embeddings",
            extra__norm="bert.embeddings.LayerNorm",
            transform="cls.predictions",
            transform__dense="cls.predictions.transform.dense",
            transform__norm="cls.predictions.transform.LayerNorm",
        ),
        layers="bert.encoder.layer",
        inside=_places(
            attention__query="attention.self.query",
            attention__key="attention.self.key",
            attention__value="attention.self.value",
            attention__out="attention.output.dense",
            attention_norm="attention.output.LayerNorm",
            ffn__up="intermediate.dense",
            ffn__down="output.dense",
            ffn_norm="output.LayerNorm",
        ),
        keys=BERT_KEYS,
        write=_write_bert,
        defaults=lambda config: {"norm_eps": 1e-12, "tie_embeddings": True},
        read=_square_heads("hidden_size", "num_attention_heads"),
        conditions=_bert_conditions,
        no_parameters=r"bert\.embeddings\.position_ids|bert\.pooler\..*|cls\.seq_relationship\..*",
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        objectives=("mlm",),
        is_square=True,
    ),
}
"""The families by their `model_type`, in the order in which a shape is compared with them."""
