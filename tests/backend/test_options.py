"""What a user may pass: options, modes, environment variables; what is wrong is said before anything is changed."""

import subprocess
import sys

import pytest
import torch
from dsi.ir.errors import DsiError
from dsi.ir.options import Options
from torch import nn


def compiled_linear(**kwargs):
    model = nn.Linear(5, 7).eval()
    return model, torch.compile(model, backend="dsi", **kwargs)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_of_torch_compile_are_taken(mode):
    model, compiled = compiled_linear(mode=mode)
    x = torch.randn(3, 5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_mode_among_the_options():
    assert Options.parse({"mode": "max-autotune"}).mode == "max-autotune"
    assert Options.parse(None, "reduce-overhead").mode == "reduce-overhead"


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"mode": "fastest"}, ["mode", "fastest", "reduce-overhead"]),
        ({"options": {"dmup": "x"}}, ["'dmup'", "did you mean 'dump'"]),
        ({"options": {"dump": ""}}, ["'dump'", "name a folder"]),
        ({"options": {"fuel": -1}}, ["'fuel'", "-1"]),
        ({"options": {"fuel": True}}, ["'fuel' = True", "give a number"]),
        ({"options": {3: True}}, ["3", "string"]),
        ({"options": {"zzz": 1, "check": "perhaps"}}, ["'zzz'", "'check'", "known:"]),
    ],
)
def test_a_wrong_option_is_a_sentence_and_changes_nothing(kwargs, words):
    _, compiled = compiled_linear(**kwargs)
    with torch.no_grad(), pytest.raises(Exception) as caught:
        compiled(torch.randn(3, 5))
    assert "DsiError" in str(caught.value) or isinstance(caught.value, DsiError)
    for word in words:
        assert word in str(caught.value)


def test_environment_fills_what_is_not_given(monkeypatch, tmp_path):
    monkeypatch.setenv("DSI_DUMP", str(tmp_path))
    monkeypatch.setenv("DSI_CHECK", "1")
    monkeypatch.setenv("DSI_FUEL", "3")
    parsed = Options.parse({"fuel": 5})
    assert (parsed.dump, parsed.check, parsed.fuel) == (tmp_path, True, 5)
    monkeypatch.setenv("DSI_CHECK", "0")
    assert not Options.parse().check


def test_the_backend_is_found_without_an_import():
    program = (
        "import torch, sys; torch.set_num_threads(1)\n"
        "assert 'dsi' in torch._dynamo.list_backends()\n"
        "assert 'dsi' not in sys.modules\n"
        "m = torch.nn.Linear(5, 7); x = torch.randn(3, 5)\n"
        "with torch.no_grad(): torch.testing.assert_close(torch.compile(m, backend='dsi')(x), m(x))\n"
        "assert 'dsi.compiler.backend' in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_transformers_compile_config_reaches_the_backend():
    transformers = pytest.importorskip("transformers")
    import zoo
    from dsi.compiler.observe import collecting

    model = zoo.decoder("llama")
    ids = torch.randint(3, zoo.VOCAB, (2, 5))
    config = transformers.CompileConfig(backend="dsi", mode="reduce-overhead", fullgraph=False, dynamic=None)
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True)
    config._compile_all_devices = True  # generate compiles on accelerators only, unless told
    with collecting() as contexts:
        got = model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="static", compile_config=config)
    assert torch.equal(got, wanted)
    assert contexts and {context.options.mode for context in contexts} == {"reduce-overhead"}
    assert all(context.report.hits["lift.attention"] == 2 for context in contexts)
