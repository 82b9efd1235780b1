"""Keywords under attn_implementation="attnpack": those that change attention are honoured or refused. All
others are ignored, as under sdpa."""

import ast
import inspect
import re
from pathlib import Path

import attnpack.hf
import pytest
import torch
import transformers
from attnpack.hf.arguments import REFUSED
from hf_families import inputs, make_model, padding, since
from transformers.generation.continuous_batching import input_outputs
from transformers.integrations import eager_paged, flash_attention, flex_attention, msa_attention, sdpa_attention

attnpack.hf.register()

HONOURED = set(inspect.signature(attnpack.hf.attention_forward).parameters) | {
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "seq_idx",
    "sliding_window",  # our mask contains it
}
HARMLESS = {
    "position_ids",  # RoPE and the mask have used them already
    "cache_position",
    "max_length_q",
    "max_length_k",
    "deterministic",
    "kernel_options",
    "target_dtype",
    "attn_implementation",
    "input_ids",
    "logits_indices",
    "logits_processor_args",
    "use_cache",
}
CALL = re.compile(r"= attention_interface\(")


def handed_over():
    """{keyword: a model of transformers that passes it to its attention function}"""
    found = {}
    for path in Path(transformers.models.__file__).parent.glob("*/modeling_*.py"):
        text = path.read_text()
        for call in CALL.finditer(text):
            end = text.index("\n", text.index(")\n", call.end()) + 1)
            while text[call.end() - 1 : end].count("(") != text[call.end() - 1 : end].count(")"):
                end = text.index("\n", end) + 1
            keywords = ast.parse("call" + text[call.end() - 1 : end].strip(), mode="eval").body.keywords
            found |= {keyword.arg: path.stem for keyword in keywords if keyword.arg}
    return found


def read_by(function):
    """Names of the arguments and of the further keywords that an attention function of transformers reads."""
    further = re.findall(r"""\bkwargs(?:\.get\(|\.pop\(|\[)["'](\w+)["']""", inspect.getsource(function))
    return {name for name in inspect.signature(function).parameters if name != "kwargs"} | set(further)


@since("5.23")
def test_every_keyword_of_the_installed_models_is_checked():
    keywords = handed_over()
    assert {"scaling", "s_aux", "block_indices", "sinks"} <= keywords.keys(), "the calls are written another way"
    unknown = {name: model for name, model in keywords.items() if name not in HONOURED | HARMLESS | set(REFUSED)}
    assert not unknown, "honour or refuse what changes attention"


@pytest.mark.parametrize(
    "function",
    [
        sdpa_attention.sdpa_attention_forward,
        flash_attention.flash_attention_forward,
        flash_attention._flash_attention_forward,
        flex_attention.flex_attention_forward,
        eager_paged.eager_paged_attention_forward,
        msa_attention.msa_attention_forward,
    ],
    ids=lambda function: function.__name__,
)
def test_every_keyword_of_the_installed_attention_functions_is_checked(function):
    tensors = {"query_states", "key_states", "value_states", "query_length"}  # attention_forward's query, key, value
    assert read_by(function) <= HONOURED | HARMLESS | tensors | set(REFUSED)


@since("5.23")
def test_every_keyword_of_a_paged_cache_is_checked():
    assert input_outputs.PagedAttentionArgs.__annotations__.keys() <= HONOURED | HARMLESS | set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_named(name):
    heads = torch.zeros(2, 4, 3, 8)
    with pytest.raises(ValueError, match=f"attnpack: {name}: got object, which attnpack cannot honour; want None: "):
        attnpack.hf.attention_forward(torch.nn.Module(), heads, heads, heads, None, **{name: object()})
    for off in (None, False):
        attnpack.hf.attention_forward(torch.nn.Module(), heads, heads, heads, None, **{name: off})


@pytest.fixture(scope="module", params=["llama", "llama replaced", "deepseek_v3 replaced"])
def model(request):
    family, *replaced = request.param.split()
    model = make_model(family)
    if replaced:
        attnpack.hf.replace_attention(model)
    model.set_attn_implementation("attnpack")
    return model


def test_a_model_names_it_too(model):
    ids = inputs("llama", padding("none"))["input_ids"]
    with pytest.raises(ValueError, match="attnpack: head_mask: got Tensor"):
        model(ids, head_mask=torch.ones(2, 4))


def test_a_replaced_latent_layer_names_what_only_the_operator_takes():
    model = attnpack.hf.replace_attention(make_model("deepseek_v3"))
    ids = inputs("llama", padding("none"))["input_ids"]
    with pytest.raises(ValueError, match="attnpack: softcap: got float, .*leave the layers as they are"):
        model(ids, softcap=30.0)


LOSS_NAMES = {
    "shift_labels": lambda labels: torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous(),
    "ignore_index": lambda labels: int(labels[0, 3]),
    "num_items_in_batch": lambda labels: torch.tensor(7.0),
    "token_type_ids": torch.zeros_like,
    "a_flag_of_a_trainer": lambda labels: True,
    "a_tensor_of_a_trainer": lambda labels: torch.ones(3),
    "a_name": lambda labels: "text",
}


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_keywords_of_losses_and_trainers_go_by(model, name):
    batch = inputs("llama", padding("none"))
    labels = batch["input_ids"]
    with torch.no_grad():
        plain = model(**batch, labels=labels)
        out = model(**batch, labels=labels, **{name: LOSS_NAMES[name](labels)})
    assert torch.equal(out.logits, plain.logits)
    # shift_labels are the shifted labels, so that only these two keywords change the loss.
    changed = name in ("ignore_index", "num_items_in_batch")
    assert torch.isclose(out.loss, plain.loss, rtol=1e-5) != changed
