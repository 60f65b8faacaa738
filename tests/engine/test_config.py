"""Keys of init_inference: names, aliases, defaults, spellings; the unknown, the contradictory, the idle; mistakes change nothing."""

import copy
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from dsi import ConfigError, DsiError, InferenceConfig, init_inference

parse = InferenceConfig.parse

# Every key of DeepSpeed's that means something here: another spelling of it, a value that is no default, and the value as it is read.
KEYS = [
    ("replace_with_kernel_inject", "kernel_inject", True, True),
    ("dtype", None, "bf16", torch.bfloat16),
    ("injection_policy", "injection_dict", {nn.Linear: "out"}, {nn.Linear: ("out",)}),
    ("checkpoint", None, {"type": "ds_model"}, {"type": "ds_model"}),
    ("base_dir", None, "weights", "weights"),
    ("save_mp_checkpoint_path", None, "out", "out"),
    ("quantization_setting", None, 8, (8, False)),
    ("max_out_tokens", "max_tokens", 77, 77),
    ("min_out_tokens", "min_tokens", 7, 7),
    ("enable_cuda_graph", None, True, True),
    ("return_tuple", None, False, False),
    ("keep_module_on_host", None, True, True),
    ("options", None, {"library": False}, {"library": False}),
]


@pytest.mark.parametrize(("key", "alias", "value", "read"), KEYS, ids=[row[0] for row in KEYS])
def test_a_key_is_read_from_each_place_by_each_name(key, alias, value, read, tmp_path):
    default = getattr(parse(), key)
    assert default != read
    assert getattr(parse(**{key: value}), key) == read == getattr(parse({key: value}), key)
    if alias is not None:
        assert getattr(parse(**{alias: value}), key) == read == getattr(parse({alias: value}), key)
    assert getattr(parse(parse(**{key: value})), key) == read
    assert getattr(parse(**{key: "auto"}), key) == default
    if key != "injection_policy":  # classes are not JSON
        (tmp_path / "config.json").write_text(json.dumps({key: value}))
        assert getattr(parse(tmp_path / "config.json"), key) == read == getattr(parse(str(tmp_path / "config.json")), key)


def test_defaults_are_deepspeeds():
    config = parse()
    assert config.dtype == torch.float16 and not config.replace_with_kernel_inject and not config.enable_cuda_graph
    assert (config.max_out_tokens, config.min_out_tokens, config.tensor_parallel.tp_size, config.return_tuple) == (1024, 1, 1, True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("torch.float32", "fp32", "float32", "float", torch.float)),
        *((name, torch.float16) for name in ("torch.float16", "fp16", "float16", "half", torch.half)),
        *((name, torch.bfloat16) for name in ("torch.bfloat16", "bf16", "bfloat16", "bfloat", torch.bfloat16)),
        *((name, torch.int8) for name in ("torch.int8", "int8", torch.int8)),
        (None, None),
    ],
)
def test_spellings_of_a_dtype(name, dtype):
    assert parse(dtype=name).dtype == dtype


@pytest.mark.parametrize("value", ["fp61", torch.float64, torch.int32, 16, ["fp16"]])
def test_what_is_no_dtype(value):
    with pytest.raises(ConfigError, match=r"dtype = .*known: fp32, .*int8"):
        parse(dtype=value)


@pytest.mark.parametrize("value", [(8, True), (True, 8), [8, True]])
def test_a_quantization_setting_in_either_order(value):
    assert parse(quantization_setting=value).quantization_setting == (8, True)


@pytest.mark.parametrize("value", [True, (8, 8), (True, False), 0, (8, True, 1), "8", ()])
def test_what_is_no_quantization_setting(value):
    with pytest.raises(ConfigError, match=r"quantization_setting = .*number of groups"):
        parse(quantization_setting=value)


@pytest.mark.parametrize("section", ["tensor_parallel", "tp"])
def test_tensor_parallel_is_a_section(section):
    assert parse(**{section: {"tp_size": 4}}).tensor_parallel.tp_size == 4
    with pytest.raises(ConfigError, match=r"unknown key 'tp_sise'; did you mean 'tp_size'"):
        parse(**{section: {"tp_sise": 4}})
    with pytest.raises(ConfigError, match=r"tensor_parallel = 4: give a dict with the keys tp_size"):
        parse(**{section: 4})
    with pytest.raises(ConfigError, match=r"belongs into a section: tensor_parallel"):
        parse(tp_size=4)
    with pytest.raises(ConfigError, match=r"unknown key 'tp_sise'; did you mean tensor_parallel=\{'tp_size': \.\.\.\}\?"):
        parse(tp_sise=4)


@pytest.mark.parametrize("section", ["checkpoint_config", "ckpt_config"])
def test_the_checkpoint_section(section):
    given = {"checkpoint_dir": "a", "save_mp_checkpoint_path": "b", "base_dir": "c"}
    assert parse(**{section: given}).checkpoint_config.model_dump() == given
    with pytest.raises(ConfigError, match=r"unknown key 'checkpoint_dri'; did you mean 'checkpoint_dir'"):
        parse(**{section: {"checkpoint_dri": "a"}})


def test_mp_size_goes_where_it_belongs():
    with pytest.warns(FutureWarning, match=r"'mp_size' is deprecated: give tensor_parallel=\{'tp_size': 2\}"):
        assert parse(mp_size=2).tensor_parallel.tp_size == 2
    with pytest.warns(FutureWarning):
        assert parse({"tp": {"tp_size": 2}}, mp_size=2).tensor_parallel.tp_size == 2
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match=r"'mp_size' = 2 and tp\['tp_size'\] = 1"):
        parse(mp_size=2, tp={"tp_size": 1})
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match=r"tensor_parallel = 1: give a dict"):
        parse(mp_size=2, tensor_parallel=1)


# ---------------------------------------------------------------------------------------------------- contradictions and mistakes


def test_a_contradiction_names_both_values():
    with pytest.raises(ConfigError, match=r"config has 'kernel_inject' = True, and the call 'replace_with_kernel_inject' = False"):
        parse({"kernel_inject": True}, replace_with_kernel_inject=False)
    with pytest.raises(ConfigError, match=r"'max_tokens' = 5 and 'max_out_tokens' = 6 name the same thing"):
        parse(max_tokens=5, max_out_tokens=6)
    with pytest.raises(ConfigError, match=r"config has 'tp' = \{'tp_size': 2\}, and the call 'tensor_parallel' = \{'tp_size': 1\}"):
        parse({"tp": {"tp_size": 2}}, tensor_parallel={"tp_size": 1})


def test_the_same_value_twice_is_no_contradiction():
    assert parse({"max_tokens": 5, "dtype": "fp16"}, max_out_tokens=5, dtype=torch.half).max_out_tokens == 5


def test_config_and_arguments_are_merged_and_neither_is_changed():
    config = {"max_out_tokens": 5, "tp": {"tp_size": 1}}
    before = copy.deepcopy(config)
    read = parse(config, dtype="fp32")
    assert (read.max_out_tokens, read.dtype) == (5, torch.float32)
    assert config == before


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("kernel_injct", "kernel_inject"),
        ("max_out_token", "max_out_tokens"),
        ("d_type", "dtype"),
        ("use_tritn", "use_triton"),
        ("mp_sizes", None),
    ],
)
def test_an_unknown_key_names_the_nearest(key, near):
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'" + (f"; did you mean '{near}'" if near else "")):
        parse(**{key: 1})


def test_unknown_keys_are_refused_when_the_class_is_called_too():
    with pytest.raises(ValueError, match=r"did you mean 'kernel_inject'"):
        InferenceConfig(kernel_injct=True)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (dict(max_out_tokens=0), "max_out_tokens = 0: .*greater than or equal to 1"),
        (dict(max_out_tokens="many"), "max_out_tokens = 'many'"),
        (dict(max_out_tokens=True), "max_out_tokens = True: give a number"),
        (dict(tp={"tp_size": True}), "tp_size = True: give a number"),
        (dict(max_out_tokens=5, min_out_tokens=6), "min_out_tokens = 6 is more than max_out_tokens = 5"),
        (dict(replace_with_kernel_inject="perhaps"), "replace_with_kernel_inject = 'perhaps'"),
        (dict(checkpoint=3), "checkpoint = 3: give a dict, or the path"),
        (dict(options={"dmup": "out"}), "unknown option 'dmup'; did you mean 'dump'"),
        (dict(injection_policy={int: "x"}), "int'> is no subclass of torch.nn.Module"),
        (dict(injection_policy={nn.Linear: 3}), "Linear: 3 is neither a name ending"),
        (dict(injection_policy=["x"]), "give a dict from a module class"),
    ],
)
def test_a_wrong_value_is_a_sentence_that_names_the_key(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(**given)


def test_mistakes_in_the_config_file(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config.json' cannot be read: No such file"):
        parse(path)
    path.write_text("{not json")
    with pytest.raises(ConfigError, match=r"config.json' is not JSON: .*line 1 column 2"):
        parse(path)
    path.write_text('{"dtype": "fp32", "dtype": "fp16"}')
    with pytest.raises(ConfigError, match=r"config.json' is not JSON: the key 'dtype' is there twice"):
        parse(path)
    path.write_text('\ufeff{"dtype": "fp32"}', encoding="utf-8")
    assert parse(path).dtype == torch.float32
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"config.json' holds a list"):
        parse(path)
    with pytest.raises(ConfigError, match=r"config is a int; give a dict"):
        parse(3)


# ------------------------------------------------------------------------------------------------------ accepted without effect


@pytest.mark.parametrize("key", sorted(InferenceConfig.without_effect))
def test_deepspeeds_other_keys_are_accepted_with_a_warning_that_says_why(key):
    with pytest.warns(UserWarning, match=rf"'{key}' has no effect here: .*") as warned:
        assert parse({key: 1}) == parse()
    assert [w.filename for w in warned] == [__file__]
    assert len(InferenceConfig.without_effect[key]) > 20


def test_every_field_of_deepspeeds_config_is_known():
    fields = """replace_with_kernel_inject kernel_inject dtype tensor_parallel tp enable_cuda_graph use_triton triton_autotune zero
        triangular_masking tm moe keep_module_on_host quant checkpoint base_dir set_empty_params save_mp_checkpoint_path checkpoint_config
        ckpt_config return_tuple training_mp_size replace_method injection_policy injection_dict injection_policy_tuple config args
        max_out_tokens max_tokens min_out_tokens min_tokens transposed_mode mp_size mpu ep_size ep_group expert_group ep_mp_group
        expert_mp_group moe_experts moe_type quantization_setting"""
    known = {*InferenceConfig.names(), *InferenceConfig.without_effect, "mp_size", "mpu"}
    assert set(fields.split()) <= known


@pytest.mark.parametrize("key", ["enabled", "tp_grain_size"])
def test_keys_of_tensor_parallel_without_effect(key):
    with pytest.warns(UserWarning, match=rf"'{key}' has no effect here: "):
        parse(tp={key: 64})


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("given", "key", "why"),
    [
        (dict(max_out_tokens=9), "max_out_tokens", "only wrapped"),
        (dict(min_out_tokens=2), "min_out_tokens", "only wrapped"),
        (dict(enable_cuda_graph=True), "enable_cuda_graph", "only wrapped"),
        (dict(options={"library": False}), "options", "only wrapped"),
        (
            dict(enable_cuda_graph=True, replace_with_kernel_inject=True, keep_module_on_host=True),
            "enable_cuda_graph",
            "the module is on cpu",
        ),
        (dict(quantization_setting=8), "quantization_setting", "dtype=torch.int8 only"),
        (dict(base_dir="weights"), "base_dir", "no checkpoint is read"),
    ],
)
def test_a_key_that_the_others_leave_idle_is_warned_of(given, key, why):
    with pytest.warns(UserWarning, match=rf"'{key}' has no effect here: .*{why}") as warned:
        init_inference(linear(), dtype="fp32", **given)
    assert {w.filename for w in warned} == {__file__}


def test_a_plain_call_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init_inference(linear(), dtype="fp32", replace_with_kernel_inject=True, tensor_parallel={"tp_size": 1}, max_out_tokens=9)


# ----------------------------------------------------------------------------------------------------------------- not there yet


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (dict(tp={"tp_size": 2}), r"tensor_parallel=\{'tp_size': 2\}: splitting a model over GPUs is not there yet"),
        (dict(tp={"tp_size": 2}, injection_policy={nn.Sequential: "0"}), "injection_policy .* waits for the same"),
        (dict(tp={"mpu": object()}), "process groups of your own"),
        (dict(tp={"tp_group": object()}), "process groups of your own"),
        (dict(checkpoint="list.json"), "checkpoint: reading weights from a checkpoint list is not there yet"),
        (dict(ckpt_config={"checkpoint_dir": "x"}), "checkpoint_config=.*: reading weights from a checkpoint list"),
        (dict(save_mp_checkpoint_path="x"), "save_mp_checkpoint_path: writing split weights"),
        (dict(ckpt_config={"save_mp_checkpoint_path": "x"}), "checkpoint_config=.*: writing split weights"),
    ],
)
def test_what_is_not_there_yet_says_so_before_the_module_is_touched(given, sentence):
    module = linear().train()
    with pytest.raises(NotImplementedError, match=sentence):
        init_inference(module, dtype="bf16", **given)
    assert module.training and module[0].weight.dtype == torch.float32


def test_a_mistake_in_the_keys_leaves_the_module_as_it_was():
    module = linear().train()
    for given in (dict(kernel_injct=True), dict(injection_policy={nn.Conv1d: "x"}), dict(injection_policy={nn.Sequential: "1"})):
        with pytest.raises(ConfigError):
            init_inference(module, dtype="bf16", **given)
    assert module.training and module[0].weight.dtype == torch.float32


def test_config_errors_are_caught_as_deepspeeds_scripts_catch_them():
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, DsiError)


def test_the_document_has_a_row_for_every_key():
    text = (Path(__file__).resolve().parent.parent.parent / "docs" / "engine.md").read_text()
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+)(?: \([^|]*\))? \| (?:(`\w+`) \||)", text, re.MULTILINE)
    rows = {name for pair in cells for cell in pair for name in re.findall(r"`(\w+)`", cell)}
    sections = {"enabled", "tp_grain_size"}
    assert rows == {*InferenceConfig.names(), *InferenceConfig.without_effect, "mp_size"} | sections
