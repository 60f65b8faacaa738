"""The engine takes its module's place: output types, attributes, modes, copies; and what it makes of modules in unusual states."""

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import transformers as T
import zoo
from dsi.compiler.observe import collecting
from torch import nn

from dsi import ConfigError, InferenceEngine, init_inference

# What the engine adds does not depend on how a graph is run, and references need no C++ compiler's time.
INJECT = {"dtype": torch.float32, "replace_with_kernel_inject": True, "options": {"executor": "reference"}}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, 10), nn.Linear(10, 6), nn.Dropout(0.5)
        self.note = "mine"

    def forward(self, x, *, scale=1.0):
        return x + self.dropout(self.down(torch.relu(self.up(x)))) * scale


@pytest.fixture
def ids():
    return torch.tensor([[5, 7, 9, 11]])


def test_a_compiled_encoder(ids):
    bert = zoo.encoder("bert")
    with torch.no_grad():
        eager = bert(input_ids=ids)
    engine = init_inference(bert, **INJECT)
    with collecting() as contexts:
        out = engine(input_ids=ids.to(engine.device))
    assert contexts and contexts[0].report.regions
    assert type(out) is type(eager) and out.keys() == eager.keys()
    assert zoo.relative_error(out.last_hidden_state.cpu(), eager.last_hidden_state) < 1e-5
    with pytest.raises(AttributeError, match="this engine has no generate: BertModel is no transformers model that can"):
        _ = engine.generate
    assert not hasattr(engine, "generate")


def test_a_module_of_ones_own():
    module = Mlp()
    x = torch.randn(3, 6)
    engine = init_inference(module, **INJECT)
    with collecting() as contexts:
        out = engine(x.to(engine.device), scale=0.5)
    assert contexts and contexts[0].report.regions
    with torch.no_grad():
        torch.testing.assert_close(out, module(x.to(engine.device), scale=0.5))
    with pytest.raises(AttributeError, match="Mlp is no transformers model that can"):
        engine.generate(x)


class Writer(torch.nn.Module):
    """A model that generates in its own way, and keeps what it has read in an attribute that its forward reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(97, 32), torch.nn.Linear(32, 97)
        self.offset, self.eager = 0.0, 0

    def forward(self, ids):
        if not torch.compiler.is_compiling():
            self.eager += 1
        return self.head(torch.relu(self.embed(ids) + self.offset))

    def generate(self, ids, new, call=True):
        self.offset = 0.5
        for _ in range(new):
            logits = self(ids) if call else self.head(self.embed(ids))
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return ids


def test_a_generate_of_the_modules_own_calls_the_compiled_forward(ids):
    module = Writer()
    expected, module.offset, module.eager = module.generate(ids, 4), 0.0, 0
    engine = init_inference(module, **INJECT)
    assert torch.equal(engine.generate(ids.to(engine.device), 4).cpu(), expected)
    assert module.eager == 0 and module.offset == 0.5, "it is the module that generates"
    with pytest.warns(UserWarning, match="nothing of this generation was compiled: the generate of Writer does not call"):
        engine.generate(ids.to(engine.device), 2, call=False)


class Guided(Writer):
    """One that generates with a copy of itself that it has written to."""

    def generate(self, ids):
        draft = copy.deepcopy(self)
        with torch.no_grad():
            draft.head.weight.neg_()
        return (self(ids) - draft(ids)).argmax(-1)


def test_a_copy_that_a_generate_makes_is_a_module_of_its_own(ids):
    module = Guided()
    expected = module.generate(ids)
    engine = init_inference(module, **INJECT)
    assert torch.equal(engine.generate(ids.to(engine.device)).cpu(), expected)


def test_without_kernel_inject_nothing_is_compiled(ids):
    module = zoo.decoder("llama")
    engine = init_inference(module, dtype=torch.float32)
    with collecting() as contexts:
        logits = engine(input_ids=ids.to(engine.device)).logits
        tokens = engine.generate(ids.to(engine.device), max_new_tokens=3, do_sample=False)
    assert not contexts and engine.module is module and engine.generate == module.generate
    assert tokens.shape == (1, 7) and not logits.requires_grad


def test_options_reach_the_compiler(tmp_path):
    engine = init_inference(Mlp(), **INJECT | {"options": {"dump": str(tmp_path / "dump"), "executor": "reference"}})
    engine(torch.randn(3, 6, device=engine.device))
    assert (tmp_path / "dump" / "graph_000" / "report.txt").exists()


def test_attributes_are_the_modules():
    module = zoo.decoder("llama")
    engine = init_inference(module, **INJECT)
    assert engine.config is module.config and engine.generation_config is module.generation_config
    assert engine.can_generate() and engine.dtype == torch.float32 and engine.device == module.device
    assert engine.get_input_embeddings() is module.get_input_embeddings()
    assert inspect.signature(engine.forward) == inspect.signature(module.forward)  # pipelines look at it
    assert {"config", "forward", "inference_config", "lm_head"} <= set(dir(engine))
    with pytest.raises(AttributeError, match="confg"):
        _ = engine.confg


def test_an_attribute_that_is_set_is_set_on_the_module():
    """Else `engine.generation_config = ...` would change what the engine shows, and not what it does."""
    engine = init_inference(zoo.decoder("llama"), **INJECT)
    engine.generation_config = T.GenerationConfig(max_new_tokens=7)
    assert engine.module.generation_config.max_new_tokens == 7
    engine.new = 3
    assert engine.new == 3 and not hasattr(engine.module, "new")
    with pytest.raises(AttributeError, match="call init_inference on the other one"):
        engine.module = Mlp()


def test_return_tuple_changes_no_type(ids):
    """In DeepSpeed it says what a replaced layer returns. Here layers return what the model's code expects of them."""
    for return_tuple in (True, False):
        engine = init_inference(zoo.encoder("bert"), dtype="fp32", return_tuple=return_tuple)
        given = ids.to(engine.device)
        assert isinstance(engine(input_ids=given), T.utils.ModelOutput)
        assert isinstance(engine(input_ids=given, return_dict=False), tuple)


# ------------------------------------------------------------------------------------------------------------- modes and gradients


def test_eval_and_no_gradients():
    module = Mlp().train()
    engine = init_inference(module, **INJECT)
    assert not engine.training and not module.training
    x = torch.randn(3, 6, device=engine.device, requires_grad=True)
    assert torch.is_grad_enabled() and not engine(x).requires_grad
    torch.testing.assert_close(engine(x), engine(x))
    assert all(p.requires_grad for p in module.parameters())


def test_train_leaves_an_engine_in_eval_mode_and_says_so():
    engine = init_inference(Mlp(), **INJECT)
    around = nn.ModuleList([engine, nn.Dropout()])
    with pytest.warns(UserWarning, match=r"an inference engine stays in eval mode.*engine\.module"):
        around.train()
    assert around[1].training and not engine.training and not engine.module.training
    assert around.eval() is around


# ---------------------------------------------------------------------------------------------------------------- unusual modules


def test_twice_on_one_module_shares_its_weights():
    module = Mlp()
    first, second = init_inference(module, **INJECT), init_inference(module, **INJECT)
    x = torch.randn(3, 6, device=first.device)
    torch.testing.assert_close(first(x), second(x))
    assert first.module is second.module


def test_twice_with_two_dtypes_warns_that_the_first_changes_too():
    module = Mlp()
    first = init_inference(module, **INJECT)
    with pytest.warns(UserWarning, match=r"in an engine made as torch\.float32 already; it is cast to torch\.bfloat16 there too"):
        second = init_inference(module, **INJECT | {"dtype": "bf16"})
    x = torch.randn(3, 6, device=first.device, dtype=torch.bfloat16)
    torch.testing.assert_close(first(x), second(x))


def test_an_engine_of_an_engine_is_an_engine_of_its_module():
    first = init_inference(Mlp(), dtype="fp32")
    assert init_inference(first, **INJECT).module is first.module


def _wrapped(module):
    return torch.compile(module, backend="eager")


def _in_place(module):
    module.compile(backend="eager")
    return module


def _forward(module):
    module.forward = torch.compile(module.forward, backend="eager")
    return module


@pytest.mark.parametrize("how", [_wrapped, _in_place, _forward])
def test_a_module_that_was_compiled_before_is_compiled_once(how):
    module = Mlp().eval()
    x = torch.randn(3, 6)
    with torch.no_grad():
        eager = module(x)
    with pytest.warns(UserWarning, match="compile"):
        engine = init_inference(how(module), **INJECT)
    with collecting() as contexts:
        out = engine(x.to(engine.device))
    assert engine.module is module and contexts and contexts[0].report.regions
    torch.testing.assert_close(out.cpu(), eager)


def test_weights_on_the_meta_device_are_refused_by_name():
    with torch.device("meta"):
        module = Mlp()
    with pytest.raises(ConfigError, match=r"'up.weight' of Mlp is on the meta device.*load its weights first"):
        init_inference(module, **INJECT)


@pytest.mark.parametrize("given", [None, "gpt2", torch.relu])
def test_what_is_no_module_is_refused(given):
    with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module, and was given a"):
        init_inference(given)


def test_a_pipeline_is_told_which_part_to_give():
    class TextGenerationPipeline:
        model = Mlp()

    with pytest.raises(ConfigError, match=r"given a TextGenerationPipeline; give its module, e\.g\. init_inference\(pipe\.model"):
        init_inference(TextGenerationPipeline())


class T5Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.SelfAttention = nn.ModuleDict({"o": nn.Linear(4, 4)})


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ({Mlp: "up"}, "Sequential has no Mlp"),
        ({T5Block: ("SelfAttention.o", "SelfAtention.o")}, r"ends with 'SelfAtention\.o'; did you mean 'SelfAttention\.o'"),
        ({T5Block: "ention.o"}, "ends with 'ention.o'"),
    ],
)
def test_an_injection_policy_that_fits_nothing_is_refused(policy, sentence):
    with pytest.raises(ConfigError, match=sentence):
        init_inference(nn.Sequential(T5Block()), injection_policy=policy)
    assert init_inference(nn.Sequential(T5Block()), dtype="fp32", injection_policy={T5Block: ("SelfAttention.o",)})


# --------------------------------------------------------------------------------------------------------- copies, moves, memory


@pytest.mark.parametrize("again", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))], ids=["deepcopy", "pickle"])
def test_copies_have_weights_of_their_own(again):
    engine = init_inference(Mlp(), **INJECT)
    x = torch.randn(3, 6, device=engine.device)
    before = engine(x)
    other = again(engine)
    assert isinstance(other, InferenceEngine) and other.inference_config == engine.inference_config
    with torch.no_grad():
        other.module.down.weight.zero_()
        other.module.down.bias.zero_()
    torch.testing.assert_close(other(x), x)
    torch.testing.assert_close(engine(x), before)


def test_weights_written_and_replaced_after_the_first_call_count():
    engine = init_inference(Mlp(), **INJECT)
    x = torch.randn(3, 6, device=engine.device)
    engine(x)
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in engine.state_dict().items()})
    torch.testing.assert_close(engine(x), x)
    engine.module.down.bias = nn.Parameter(torch.ones(6, device=engine.device))
    torch.testing.assert_close(engine(x), x + 1)


def test_an_engine_lets_go_of_its_weights():
    """By counting references, without waiting for the garbage collector: weights may be most of a GPU."""
    gc.disable()
    try:
        engine = init_inference(Mlp(), **INJECT)
        seen = weakref.ref(engine)
        del engine
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_module_on_the_cpu_goes_to_the_gpu_unless_it_is_to_stay(monkeypatch):
    assert init_inference(Mlp(), **INJECT).device == torch.device("cuda", torch.cuda.current_device())
    assert init_inference(Mlp(), keep_module_on_host=True, **INJECT).device.type == "cpu"
    assert init_inference(Mlp().cuda(), **INJECT).device.type == "cuda"
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count() - 1))
    assert init_inference(Mlp(), **INJECT).device.index == torch.cuda.device_count() - 1


@pytest.mark.gpu
def test_enable_cuda_graph_records_a_graph_and_keeps_outputs_apart():
    engine = init_inference(Mlp(), dtype="fp32", replace_with_kernel_inject=True, enable_cuda_graph=True)
    xs = [torch.randn(3, 6, device="cuda") for _ in range(4)]
    outs = [engine(x) for x in xs]
    for x, out in zip(xs, outs, strict=True):
        torch.testing.assert_close(out, engine.module(x))


def test_spread_weights_are_refused(monkeypatch):
    module = Mlp()
    fake = type("P", (), {"is_meta": False, "device": torch.device("cuda", 1)})()
    monkeypatch.setattr(module, "parameters", lambda *a, **k: iter([module.up.weight, fake]))
    with pytest.raises(ConfigError, match="weights of Mlp are spread over cpu, cuda:1"):
        init_inference(module, **INJECT)


def test_many_engines_of_one_class_and_many_shapes_stay_compiled():
    """Dynamo counts compiled forms by code object, and past its limit goes on uncompiled in silence."""
    for width in range(3, 15):
        module = nn.Sequential(nn.Linear(6, width), nn.ReLU())
        engine = init_inference(module, **INJECT)
        with collecting() as contexts:
            engine(torch.randn(2, 6, device=engine.device))
        assert contexts


def test_no_transformers_is_needed_for_a_module_of_ones_own():
    program = "import sys; sys.modules['transformers'] = None\nimport dsi, torch\n"
    program += "engine = dsi.init_inference(torch.nn.Linear(4, 4), dtype='fp32', replace_with_kernel_inject=True, "
    program += "options={'executor': 'reference'}, keep_module_on_host=True)\nprint(engine(torch.randn(2, 4)).shape)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "torch.Size([2, 4])\n", done.stderr


def test_the_generator_is_given_what_was_asked_for():
    def made(**given):
        return init_inference(zoo.decoder("llama"), **INJECT | given).generator

    asked = made(max_out_tokens=9, min_out_tokens=3)
    assert (asked.max_out_tokens, asked.min_out_tokens, asked.options) == (9, 3, INJECT["options"])
    assert made().max_out_tokens == 1024
    # Generation on a GPU records graphs unless it is told not to.
    assert made().cuda_graph == torch.cuda.is_available() and not made(enable_cuda_graph=False).cuda_graph
    assert init_inference(zoo.decoder("llama"), dtype="fp32").generator is None
