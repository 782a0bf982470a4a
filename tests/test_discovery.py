"""How plugins are found, and how a broken one is kept from disturbing the rest."""

from __future__ import annotations

import sys
import textwrap

import pluggy
import pytest

from mlxlab import discovery, hookspecs
from mlxlab.discovery import discover, load_plugins, notify
from mlxlab.errors import ConfigError, PluginError

HEAD = """
from dataclasses import dataclass
import mlxlab

@dataclass(frozen=True)
class {cls}(mlxlab.Head):
    size: int = 4

    def __call__(self, hidden, targets, weights):
        return hidden

@mlxlab.hookimpl
def mlxlab_register_heads(register):
    register("{name}", {cls})
"""


def head(name: str) -> str:
    return HEAD.format(name=name, cls=name.title())


@pytest.fixture
def local(elsewhere):
    """Writes a file into plugins/."""

    def write(name: str, text: str) -> None:
        (elsewhere / "plugins").mkdir(exist_ok=True)
        (elsewhere / "plugins" / name).write_text(textwrap.dedent(text), encoding="utf-8")

    return write


@pytest.fixture
def install(elsewhere, monkeypatch):
    """Puts a distribution with one entry point on sys.path; its module is removed from memory at the end."""
    site = elsewhere / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    modules = []

    def write(
        distribution: str, entry_point: str, module: str, text: str, version: str = "1.0", target: str = ""
    ) -> None:
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[mlxlab]\n{entry_point} = {target or module}\n", encoding="utf-8")
        (site / f"{module}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        modules.append(module)

    yield write
    for module in modules:
        sys.modules.pop(module, None)


def names(registry, axis="head"):
    return registry.names(axis)


# ------------------------------------------------------------------------------------------------------------ sources
def test_built_in(elsewhere):
    registry = discover()
    assert names(registry, "method") == ["dpo", "orpo", "sft"]
    assert names(registry) == ["chunked", "flash", "fused", "naive"]
    assert names(registry, "backward") == ["checkpoint", "plain", "segmented"]
    assert names(registry, "layout") == ["packed", "prefix_shared", "separate"]
    assert {"llama", "qwen", "gemma4"} <= set(names(registry, "family"))
    assert {"pretrained", "tiny_llama", "tiny_gemma4"} <= set(names(registry, "source"))
    assert {entry.provider.name for entry in registry.entries() if entry.axis == "method"} == {"mlxlab"}


def test_load_plugins_looks_once(local):
    first = load_plugins()
    local("late.py", head("late"))
    assert load_plugins() is first and "late" not in names(first)


def test_local_file(local):
    local("mine.py", head("mine"))
    registry = discover()
    entry = registry.entry("head", "mine")
    assert entry.provider == ("plugins/mine.py", "") and entry.cls.__module__ == "mlxlab_local.mine"
    assert registry.build("head", "mine", {"size": 3}).size == 3


def test_local_helpers_are_not_plugins_but_can_be_imported(local):
    local("_shared.py", "SIZE = 17")
    local("mine.py", head("mine").replace("int = 4", "int = SIZE").replace("import mlxlab\n", IMPORT_SHARED))
    local("notes.txt", "not Python")
    registry = discover()
    assert registry.failures == [] and registry.build("head", "mine", {}).size == 17


IMPORT_SHARED = "import mlxlab\nfrom mlxlab_local._shared import SIZE\n"


def test_only_top_level_files(local, elsewhere):
    local("mine.py", head("mine"))
    (elsewhere / "plugins" / "deep").mkdir()
    (elsewhere / "plugins" / "deep" / "other.py").write_text(head("other"), encoding="utf-8")
    assert "other" not in names(discover())


def test_folder_from_the_environment(elsewhere, monkeypatch):
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine" / "extra.py").write_text(head("extra"), encoding="utf-8")
    monkeypatch.setenv("MLXLAB_PLUGINS_DIR", str(elsewhere / "mine"))
    assert discover().entry("head", "extra").provider.name == "mine/extra.py"
    monkeypatch.setenv("MLXLAB_PLUGINS_DIR", str(elsewhere / "absent"))
    with pytest.raises(PluginError, match="MLXLAB_PLUGINS_DIR=.*absent is not a folder"):
        discover()


def test_entry_point(install):
    install("demo-plugin", "demo", "demo_module", head("demo"), version="3.2")
    registry = discover()
    assert registry.entry("head", "demo").provider == ("demo-plugin", "3.2")
    assert registry.plugins == [("demo-plugin", "3.2")]


def test_entry_point_to_an_object(install):
    text = head("demo").replace("@mlxlab.hookimpl\ndef", "class Plugin:\n  @mlxlab.hookimpl\n  def")
    text = text.replace("heads(register)", "heads(self, register)") + "\nplugin = Plugin()\n"
    install("demo-plugin", "demo", "demo_module", text, target="demo_module:plugin")
    install("demo-class", "wrong", "class_module", text, target="class_module:Plugin")
    registry = discover()
    assert "demo" in names(registry)
    assert "it is the class Plugin; have you forgotten the () after its name?" in registry.failures[0]


# ---------------------------------------------------------------------------------------------------- broken plugins
def test_a_plugin_that_cannot_be_imported(install, local, caplog):
    install("broken-plugin", "broken", "broken_module", "import a_module_that_does_not_exist", version="0.3")
    local("mine.py", head("mine"))
    registry = discover()
    assert "mine" in names(registry) and "fused" in names(registry)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == len(registry.failures) == 1
    for part in ("broken", "broken-plugin 0.3", "a_module_that_does_not_exist", "MLXLAB_BLOCK=broken"):
        assert part in warnings[0]
    with pytest.raises(ConfigError, match="a_module_that_does_not_exist"):
        registry.build("head", "demo", {})
    with pytest.raises(ConfigError, match="a_module_that_does_not_exist"):
        registry.build("head", "fused", {"size": 4})


@pytest.mark.parametrize(
    "text, reason",
    [
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_whatever_an_import_raises(local, text, reason):
    local("bad.py", text)
    local("good.py", head("good"))
    registry = discover()
    assert "good" in names(registry) and reason in registry.failures[0] and "bad" in registry.failures[0]


def test_ctrl_c_during_an_import(local):
    local("slow.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover()


def test_strict(local, monkeypatch):
    local("bad.py", "1 / 0")
    local("worse.py", "import absent_module")
    monkeypatch.setenv("MLXLAB_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError) as error:
        discover()
    assert "plugin bad" in str(error.value) and "plugin worse" in str(error.value)
    monkeypatch.setenv("MLXLAB_STRICT_PLUGINS", "yes")
    with pytest.raises(PluginError, match="MLXLAB_STRICT_PLUGINS=yes is not understood; allowed: 0, 1"):
        discover()


def test_equal_entry_point_names_do_not_stop_the_rest(install):
    install("plug-one", "alpha", "module_one", head("one"))
    install("plug-two", "alpha", "module_two", head("two"))
    install("plug-three", "gamma", "module_three", head("three"))
    registry = discover()
    # in the order of distribution names, whatever the order of folders
    assert "one" in names(registry) and "three" in names(registry) and "two" not in names(registry)
    assert len(registry.failures) == 1
    assert "alpha (plug-two 1.0)" in registry.failures[0] and "already provided by plug-one" in registry.failures[0]


def test_two_entry_points_to_one_module(install):
    install("plug-one", "first", "same_module", head("one"))
    install("plug-two", "second", "same_module", head("one"))
    registry = discover()
    assert "one" in names(registry) and "already loaded as plugin 'first'" in registry.failures[0]


def test_equal_component_names(install):
    install("plug-one", "one", "module_one", head("same"))
    install("plug-two", "two", "module_two", head("same"))
    registry = discover()
    assert registry.entry("head", "same").provider.name == "plug-one"
    assert "head 'same' is already provided by plug-one" in registry.failures[0]


def test_nobody_replaces_a_built_in(local):
    local("mine.py", head("fused"))
    registry = discover()
    assert registry.entry("head", "fused").provider.name == "mlxlab"
    assert "head 'fused' is already provided by mlxlab" in registry.failures[0]


def test_wrong_argument_leaves_nothing_behind(local):
    bad = "\n@mlxlab.hookimpl\ndef mlxlab_record(run_dir, argument_that_is_not_in_the_spec):\n    pass\n"
    local("bad_plugin.py", head("demo") + bad)
    registry = discover()
    for part in ("bad_plugin", "mlxlab_record", "argument_that_is_not_in_the_spec"):
        assert part in registry.failures[0]
    assert "demo" not in names(registry)
    local("bad_plugin.py", head("demo"))
    assert "demo" in names(discover())


@pytest.mark.parametrize("fault", ["raise RuntimeError('late')", "register('other', int)"])
def test_a_hook_that_fails_half_way_leaves_nothing_behind(local, fault):
    local("aaa.py", head("demo") + f"    {fault}\n")
    local("bbb.py", head("demo"))  # the name is free again
    registry = discover()
    assert registry.entry("head", "demo").provider.name == "plugins/bbb.py"
    assert len(registry.failures) == 1 and "plugin aaa" in registry.failures[0]
    assert [p.name for p in registry.plugins] == ["plugins/bbb.py"]


def test_rollback_also_where_pluggy_has_none(local, monkeypatch):
    """Some versions of pluggy raise with the plugin half registered."""
    register = pluggy.PluginManager.register

    def half(self, plugin, name=None):
        if name == "mlxlab_local.aaa":
            register(self, plugin, name)
            raise pluggy.PluginValidationError(plugin, "half way")
        return register(self, plugin, name)

    monkeypatch.setattr(pluggy.PluginManager, "register", half)
    observer = "\n@mlxlab.hookimpl\ndef mlxlab_record(record):\n    record['seen'] = record.get('seen', 0) + 1\n"
    local("aaa.py", head("demo") + observer)
    local("bbb.py", head("demo") + observer)
    registry = discover()
    assert registry.entry("head", "demo").provider.name == "plugins/bbb.py"
    record = {}
    notify(registry, "mlxlab_record", run_dir=None, record=record)
    assert record == {"seen": 1}


@pytest.mark.parametrize(
    "text, sentence",
    [
        (
            "import mlxlab\n@mlxlab.hookimpl\ndef mlxlab_register_head(register): pass",
            "unknown hook 'mlxlab_register_head'",
        ),
        (
            "import mlxlab\n@mlxlab.hookimpl\ndef mlxlab_register_head(register): pass",
            "did you mean 'mlxlab_register_heads'?",
        ),
        ("def mlxlab_register_heads(register): pass", "decorate it with @mlxlab.hookimpl"),
        ("x = 1", "it implements no hook"),
        ("import mlxlab\n@mlxlab.hookimpl(wrapper=True)\ndef mlxlab_record(record):\n    yield", "is a wrapper"),
        (
            "MLXLAB_API = 99\nimport mlxlab\n@mlxlab.hookimpl\ndef mlxlab_record(record): pass",
            "it was written for plugin interface 99 (MLXLAB_API), this mlxlab has 1",
        ),
        ("import mlxlab\n@mlxlab.hookimpl\ndef mlxlab_config_dirs():\n    return 'conf'", "not an absolute path"),
    ],
)
def test_mistakes_that_would_go_unnoticed(local, text, sentence):
    local("odd.py", text)
    assert sentence in discover().failures[0]


def test_the_right_interface_version(local):
    local("mine.py", f"MLXLAB_API = {hookspecs.API_VERSION}\n" + head("mine"))
    assert "mine" in names(discover())


# ----------------------------------------------------------------------------------------------------------- blocking
def test_block(install, local, monkeypatch, caplog):
    install("demo-plugin", "demo", "demo_module", "1 / 0")
    local("mine.py", head("mine"))
    monkeypatch.setenv("MLXLAB_BLOCK", "demo-plugin, mine")
    registry = discover()
    assert "mine" not in names(registry) and not registry.failures and not caplog.records
    monkeypatch.setenv("MLXLAB_BLOCK", "demo,mime")
    registry = discover()
    assert "mine" in names(registry)
    assert "MLXLAB_BLOCK=mime blocks nothing" in caplog.text and "did you mean 'mine'?" in caplog.text


def test_block_a_built_in_package(elsewhere, monkeypatch):
    monkeypatch.setenv("MLXLAB_BLOCK", "mlxlab.heads")
    registry = discover()
    assert names(registry) == [] and names(registry, "method")


# ------------------------------------------------------------------------------------------------ folders of options
def test_config_dirs(local, elsewhere):
    folder = elsewhere / "plugins" / "conf"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 5\n", encoding="utf-8")
    config_dirs = "\n@mlxlab.hookimpl\ndef mlxlab_config_dirs():\n    return Path(__file__).parent / 'conf'\n"
    local("mine.py", "from pathlib import Path\n" + head("mine") + config_dirs)
    registry = discover()
    assert registry.config_dirs == [(("plugins/mine.py", ""), folder)]

    (folder / "head").mkdir()
    (folder / "head" / "fused.yaml").write_text("name: fused\n", encoding="utf-8")
    registry = discover()
    assert "fused.yaml would never be used: mlxlab has" in registry.failures[0]
    assert registry.config_dirs == [] and "mine" not in names(registry)


# ---------------------------------------------------------------------------------------------------------- observers
def test_an_observer_that_raises_does_not_stop_the_others(local, caplog):
    local("aaa.py", "import mlxlab\n@mlxlab.hookimpl\ndef mlxlab_record(record):\n    record['a'] = 1")
    local("bbb.py", "import mlxlab\n@mlxlab.hookimpl\ndef mlxlab_record(run_dir):\n    raise OSError('full')")
    local("ccc.py", "import mlxlab\n@mlxlab.hookimpl\ndef mlxlab_record(record, run_dir):\n    record['c'] = run_dir")
    record = {}
    notify(discover(), "mlxlab_record", run_dir="here", record=record)
    assert record == {"a": 1, "c": "here"}
    assert "plugin mlxlab_local.bbb, mlxlab_record: OSError: full" in caplog.text


def test_a_built_in_package_that_fails_is_an_error(elsewhere):
    with pytest.raises(PluginError, match="import failed with ModuleNotFoundError"):
        discover(built_in=["mlxlab.absent"])
    assert discovery.BUILT_IN == ("mlxlab.methods", "mlxlab.heads", "mlxlab.memory", "mlxlab.models")
