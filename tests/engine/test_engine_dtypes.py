"""What a cast changes in a module, and what it must not: rotary frequencies, the parts that a model keeps wide, shared tensors."""

import pytest
import torch
import transformers as T
import zoo
from dsi.engine import quantised
from dsi.engine.dtypes import cast
from dsi.quantize.formats import INT8, Format, Grouping
from dsi.quantize.modules import QuantisedLinear
from torch import nn

from dsi import ConfigError, init_inference, load_quantised, quantise_model, save_quantised


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotary_frequencies_stay_float32(dtype):
    """DeepSpeed casts them with the rest; the angle of the thousandth token is then off by up to a radian."""
    engine = init_inference(zoo.decoder("llama"), dtype=dtype)
    rotary = engine.module.model.rotary_emb
    exact = zoo.decoder("llama").model.rotary_emb.inv_freq
    assert rotary.inv_freq.dtype == torch.float32
    torch.testing.assert_close(rotary.inv_freq.cpu(), exact, rtol=0, atol=0)
    assert {p.dtype for p in engine.parameters()} == {dtype}


@pytest.mark.parametrize("name", sorted(zoo.decoder_configs()))
def test_a_cast_decoder_is_the_one_that_from_pretrained_makes(name, tmp_path):
    """Parameters have the dtypes that transformers gives them when it loads the checkpoint in half precision; equal logits."""
    model = zoo.decoder(name)
    model.save_pretrained(tmp_path)
    loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    cast(model, torch.float16)
    assert {k: v.dtype for k, v in model.named_parameters()} == {k: v.dtype for k, v in loaded.named_parameters()}
    ids = torch.randint(3, zoo.VOCAB, (1, 200))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, loaded(input_ids=ids).logits, rtol=0, atol=0)


def t5() -> nn.Module:
    config = T.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu")
    return T.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_what_a_model_keeps_wide_stays_wide(dtype, wide):
    """T5's second feed-forward weight overflows in float16; transformers keeps it in float32, DeepSpeed does not."""
    module = init_inference(t5(), dtype=dtype).module
    block = module.encoder.block[0].layer
    assert block[1].DenseReluDense.wo.weight.dtype == wide
    assert block[1].DenseReluDense.wi_0.weight.dtype == block[0].SelfAttention.o.weight.dtype == dtype


def test_back_to_float32():
    module = t5()
    cast(module, torch.float16)
    cast(module, torch.float32)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


class Around(nn.Module):
    """A user's module around one of transformers', with buffers of its own and a tensor under two names."""

    def __init__(self):
        super().__init__()
        self.inner = zoo.decoder("llama_tied")
        self.head = nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.head.register_buffer("scale", self.scale)
        self.head.register_parameter("twin", self.head.bias)


def test_a_module_around_a_transformers_model():
    module = Around()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    cast(module, torch.bfloat16)
    assert module.inner.model.rotary_emb.inv_freq.dtype == torch.float32
    assert module.scale.dtype == torch.bfloat16 and module.scale is module.head.scale and module.steps.dtype == torch.int64
    assert dict(module.named_parameters(remove_duplicate=False)).items() == parameters.items()  # the same objects, so that ties hold
    assert module.inner.lm_head.weight is module.inner.model.embed_tokens.weight
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_none_keeps_the_module_as_it_is():
    module = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 4))
    engine = init_inference(module, dtype=None)
    assert [p.dtype for p in engine.parameters()] == [torch.float64] * 2 + [torch.float32] * 2
    assert engine.dtype == torch.float64


def test_the_default_is_float16_and_a_cpu_is_warned_of():
    module = nn.Linear(4, 4)
    if torch.cuda.is_available():
        assert init_inference(module).dtype == torch.float16
        return
    with pytest.warns(UserWarning, match=r"dtype is not given, so that weights become torch.float16.*on a CPU torch.float32"):
        assert init_inference(module).dtype == torch.float16


def test_a_module_that_another_library_quantised_is_refused_unless_it_stays_as_it_is():
    module = zoo.decoder("llama")
    module.is_quantized = True
    with pytest.raises(ConfigError, match=r"'LlamaForCausalLM' was quantised by another library.*dtype=None"):
        init_inference(module, dtype="fp16")
    assert init_inference(module, dtype=None).module is module


# -------------------------------------------------------------------------------------------------------------------------- int8


def test_int8_hands_the_module_to_the_quantiser(monkeypatch):
    calls = []

    def quantise_model(module, **given):
        calls.append((module, given))
        return module

    monkeypatch.setattr("dsi.quantize.quantise_model", quantise_model, raising=False)
    module = nn.Sequential(nn.Linear(4, 4))
    init_inference(module, dtype=torch.int8, quantization_setting=(True, 64))
    init_inference(module, dtype="int8")
    assert [call[0] for call in calls] == [module, module]
    plain = {"groups": None, "mlp_extra_grouping": False, "skip": (), "format": INT8, "tied": "head"}
    assert calls[0][1] == plain | {"groups": 64, "mlp_extra_grouping": True} and calls[1][1] == plain
    init_inference(module, dtype="int8", options={"group_size": 64, "quantize_skip": "head", "tied_head": "keep"})
    assert calls[2][1] == plain | {"format": Format(Grouping("inner", 64)), "skip": ("head",), "tied": "keep"}
    init_inference(module, dtype="int8", options={"dtype": "int8", "quantize_groups": 4})
    assert calls[3][1] == plain | {"groups": 4}


def test_what_the_options_leave_out_is_not_rounded_by_the_compiler_either():
    module, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval(), torch.randn(3, 32)
    given = {"dtype": "int8", "quantize_skip": ["1"], "executor": "reference"}
    engine = init_inference(module, dtype="int8", replace_with_kernel_inject=True, options=given)
    assert type(module[0]) is QuantisedLinear and type(module[1]) is nn.Linear
    x = x.to(engine.device, module[1].weight.dtype)
    torch.testing.assert_close(engine(x), module(x))


def test_two_ways_to_group_a_weight_are_refused():
    module = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ConfigError, match=r"quantization_setting and options\['group_size'\] are two ways"):
        init_inference(module, dtype="int8", quantization_setting=4, options={"group_size": 32})
    assert type(module[0]) is nn.Linear


def test_int8_weights_generate():
    """The originals are gone, and the text is that of the module as it is now, uncompiled."""
    module = zoo.decoder("llama")
    engine = init_inference(module, dtype="int8", replace_with_kernel_inject=True, options={"executor": "reference"})
    assert not [p for p in engine.module.model.layers.parameters() if p.dim() == 2 and p.is_floating_point()]
    ids = torch.tensor([[5, 7, 9]], device=engine.device)
    tokens = engine.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(tokens, engine.module.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False))


def test_int8_without_a_quantiser_says_so_before_the_module_is_touched(monkeypatch):
    monkeypatch.delattr("dsi.quantize.quantise_model", raising=False)
    module = nn.Sequential(nn.Linear(4, 4)).train()
    with pytest.raises(NotImplementedError, match=r"dtype=torch.int8: int8 weights are not there yet"):
        init_inference(module, dtype=torch.int8)
    assert module.training
    assert quantised.QuantizationSetting() == (None, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_what_is_made_in_inference_mode_is_like_any_other(dtype):
    """Weights, or the engine, made there. Tied weights stay tied."""
    with torch.inference_mode():
        model = zoo.decoder("llama_tied")
        assert model.lm_head.weight.is_inference()
        init_inference(model, dtype=dtype)
    other = zoo.decoder("llama_tied").to(dtype or torch.float32)
    tensors = dict(model.state_dict())
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(tensors[name].cpu(), tensor) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_rounds_no_scales_of_a_quantised_model(dtype):
    model = zoo.decoder("llama_tied")
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1e-5)  # scales that fp16 does not hold
    quantise_model(model, tied="both")
    scales = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("scales")}
    init_inference(model, dtype=dtype)
    now = dict(model.named_buffers())
    assert scales and all(torch.equal(now[name], before) for name, before in scales.items())
    assert model.model.embed_tokens(torch.tensor([3])).dtype == dtype


def test_what_a_model_keeps_wide_is_wide_as_int8(tmp_path):
    """T5's `wo`, whose results float16 does not hold, and which T5 does not widen rows for where the weight is int8."""
    torch.manual_seed(0)
    model = T.T5ForConditionalGeneration(T.T5Config(vocab_size=97, d_model=32, d_ff=48, d_kv=8, num_layers=1, num_heads=4)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("wo.weight"):
            parameter.data.mul_(2e5)
    ids = torch.tensor([[3, 50, 7, 20]])

    def logits(model):
        with torch.no_grad():
            return model(input_ids=ids, decoder_input_ids=ids).logits.float()

    exact = logits(model)
    cast(model, torch.float16)
    quantise_model(model)
    save_quantised(model, tmp_path / "t5")
    loaded = load_quantised(lambda: T.T5ForConditionalGeneration(model.config), tmp_path / "t5")
    assert (logits(model) - exact).norm() < 0.05 * exact.norm() and torch.equal(logits(loaded), logits(model))
    cast(model.float(), torch.float16)  # wide again, and half again but for these
    wide = {
        name.rpartition(".")[2] for name, part in model.named_modules() if type(part) is QuantisedLinear and part.dtype == torch.float32
    }
    assert wide == {"wo"}
