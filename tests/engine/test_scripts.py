"""Scripts as DeepSpeed's and transformers' users write them, with the import changed: tiny random models of the same classes."""

import re
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers as T
import zoo
from dsi.compiler.observe import collecting
from transformers import pipeline
from transformers.models.t5.modeling_t5 import T5Block

import dsi
from bench.models import hot

local_rank, world_size = (0 if torch.cuda.is_available() else -1), 1
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "DeepSpeed", "is", "a", "library", "that", *(f"word{n}" for n in range(90))]


@pytest.fixture(scope="module")
def tokenizer():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return T.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture(scope="module")
def gpt_neo(tokenizer, tmp_path_factory):
    """A folder that stands for "EleutherAI/gpt-neo-2.7B"."""
    config = T.GPTNeoConfig(
        **dict(vocab_size=len(WORDS), hidden_size=64, num_layers=1, num_heads=4, window_size=16, max_position_embeddings=512),
        **dict(attention_types=[[["local"], 1]], bos_token_id=1, eos_token_id=2, pad_token_id=0),
    )
    torch.manual_seed(0)
    model = hot(T.GPTNeoForCausalLM(config))
    model.generation_config.suppress_tokens = [2]  # an end too early would test little
    folder = tmp_path_factory.mktemp("gpt-neo")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_text_generation_script(gpt_neo):
    generator = pipeline("text-generation", model=gpt_neo, device=local_rank)
    eager = generator("DeepSpeed is a library", do_sample=False, max_new_tokens=12)
    generator.model = dsi.init_inference(
        generator.model, tensor_parallel={"tp_size": world_size}, dtype=torch.float, replace_with_kernel_inject=True
    )
    with collecting() as contexts:
        string = generator("DeepSpeed is", do_sample=True, min_length=50)
    assert contexts and all(context.report.regions for context in contexts)
    text = string[0]["generated_text"]
    assert text.startswith("DeepSpeed is") and len(text.removeprefix("DeepSpeed is").split()) >= 48
    assert generator("DeepSpeed is a library", do_sample=False, max_new_tokens=12) == eager


def t5() -> T.T5ForConditionalGeneration:
    """A tiny google/t5-v1_1."""
    config = T.T5Config(
        **dict(vocab_size=len(WORDS), d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"),
        **dict(tie_word_embeddings=False, decoder_start_token_id=0, eos_token_id=2, pad_token_id=0),
    )
    torch.manual_seed(0)
    return hot(T.T5ForConditionalGeneration(config))


@pytest.mark.parametrize("inject", [False, True])
def test_the_injection_policy_script(inject, tokenizer):
    """As the script has it, only wrapped; and compiled. (transformers 5 has no text2text-generation task: its users call generate.)"""
    model = t5()
    inputs = tokenizer(["DeepSpeed is a library", "is that"], return_tensors="pt", padding=True)
    given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    eager = model.generate(**given, do_sample=False, max_new_tokens=6)
    engine = dsi.init_inference(
        model,
        tensor_parallel={"tp_size": world_size},
        dtype=torch.float,
        injection_policy={T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")},
        replace_with_kernel_inject=inject,
        **({"options": {"executor": "reference"}} if inject else {}),
    )
    with collecting() as contexts:
        tokens = engine.generate(**{key: value.to(engine.device) for key, value in given.items()}, do_sample=False, max_new_tokens=6)
    assert bool(contexts) == inject
    torch.testing.assert_close(tokens.cpu(), eager)


def test_a_pipeline_for_sentences(tokenizer):
    """Pipelines without generate take an engine too; this one looks at forward's signature."""
    config = T.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_labels=2
    )
    torch.manual_seed(0)
    pipe = pipeline("text-classification", model=hot(T.BertForSequenceClassification(config)), tokenizer=tokenizer, device=local_rank)
    eager = pipe("DeepSpeed is a library")
    pipe.model = dsi.init_inference(pipe.model, dtype=torch.float, replace_with_kernel_inject=True, options={"executor": "reference"})
    ours = pipe("DeepSpeed is a library")
    assert ours[0]["label"] == eager[0]["label"] and ours[0]["score"] == pytest.approx(eager[0]["score"], rel=1e-4)


# --------------------------------------------------------------------------------------------------------------- transformers' own way

IDS = torch.tensor([[5, 7, 9]])
GREEDY = {"attention_mask": torch.ones_like(IDS), "do_sample": False, "max_new_tokens": 5}


def test_transformers_compile_config_calls_the_backend():
    config = zoo.decoder_configs()["llama"]
    config.num_hidden_layers = 1
    model = T.LlamaForCausalLM(config).eval()
    eager = model.generate(IDS, **GREEDY)
    compile_config = T.CompileConfig(backend="dsi")
    compile_config._compile_all_devices = True  # without it transformers compiles on a GPU only
    with collecting() as contexts:
        tokens = model.generate(IDS, **GREEDY, cache_implementation="static", compile_config=compile_config)
    assert [context.options.mode for context in contexts] == ["reduce-overhead"] and contexts[0].report.regions
    torch.testing.assert_close(tokens, eager)


def test_generate_of_a_compiled_model_runs_uncompiled():
    """Upstream's, and silent: what docs/engine.md says to call something else for. Should this fail, torch or transformers has changed."""
    with collecting() as contexts:
        torch.compile(zoo.decoder("llama"), backend="dsi").generate(IDS, **GREEDY)
    assert not contexts


def test_the_worker_of_the_document(tokenizer, gpt_neo):
    """docs/engine.md shows what a server's worker holds: batches of prompts, and a stream."""
    text = (Path(__file__).resolve().parent.parent.parent / "docs" / "engine.md").read_text()
    (code,) = (block for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "class Worker" in block)

    class Dsi:
        @staticmethod
        def init_inference(*args, **kwargs):
            return dsi.init_inference(*args, **kwargs, options={"executor": "reference"})

    namespace = {"dsi": Dsi, "torch": torch, "transformers": T}
    exec(code, namespace)
    model = T.AutoModelForCausalLM.from_pretrained(gpt_neo)
    prompts = ["DeepSpeed is", "DeepSpeed is a library that"]
    with torch.no_grad():
        given = [tokenizer(prompt, return_tensors="pt") for prompt in prompts]
        alone = [model.generate(**one, max_new_tokens=4, do_sample=False, use_cache=False)[0, -4:] for one in given]
    worker = namespace["Worker"](model, tokenizer)
    assert worker.batch(prompts, 4) == [tokenizer.decode(ids, skip_special_tokens=True) for ids in alone]
    assert "".join(worker.stream(prompts[0], 4)).split() == tokenizer.decode(alone[0], skip_special_tokens=True).split()
