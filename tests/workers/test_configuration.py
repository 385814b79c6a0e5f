"""batching.yaml: its values, its errors with their lines, and when its version changes."""

from pathlib import Path

import pytest

from workers.configuration import ConfigurationError, find, load, parse
from workers.ipc.messages import DEFAULT_PLACES, EngineOptions, LaneOptions, StrategyOptions

FULL = """\
# Every key.
strategy:
  name: dynamic
  batch_size: 16
  window_s: 0.03
  bucket_edges: [64, 256]
  padded: true
token_budget: 4096
prefill_share: 0.8
prefix_cache: false
kv_high_water: 0.9
max_num_seqs: 64
max_model_len: 8192
max_output_tokens: 1024
lanes:
  interactive:
    priority: 0
    itl_target_ms: 80
    ageing_tokens: 5000
    max_slowdown: 1.5
  batch:
    priority: 2
    minimum_share: 0.05
    strategy: static
"""


def test_every_key_reaches_its_option() -> None:
    """Milliseconds become seconds; the file's names become the options' names."""
    options = parse(FULL).apply(EngineOptions(model_path="m"))

    assert options == EngineOptions(
        model_path="m",
        strategy=StrategyOptions(
            name="dynamic", batch_size=16, window_s=0.03, bucket_edges=(64, 256), padded=True
        ),
        max_num_batched_tokens=4096,
        prefill_share=0.8,
        prefix_caching=False,
        kv_high_water=0.9,
        max_num_seqs=64,
        max_model_len=8192,
        max_output_tokens=1024,
        lanes=(
            LaneOptions(
                name="interactive",
                priority=0,
                itl_target_s=0.08,
                ageing_tokens=5000,
                max_slowdown=1.5,
            ),
            LaneOptions(
                name="batch", priority=2, min_share=0.05, strategy=StrategyOptions(name="static")
            ),
        ),
        batching_version=options.batching_version,
    )


def test_the_command_line_overrides_the_file() -> None:
    """Options that differ from their defaults keep their values; so do places, whatever number
    would be the default of an engine."""
    config = parse("max_num_seqs: 4\ntoken_budget: 100\n")

    for num_places in (9, DEFAULT_PLACES):
        options = config.apply(EngineOptions(model_path="m", max_num_seqs=num_places))
        assert (options.max_num_seqs, options.max_num_batched_tokens) == (num_places, 100)


WRONG = [
    ("lanes:\n  batch:\n    minimum_share: 1.5\n",
     "batching.yaml:3: lanes.batch.minimum_share: must be at least 0 and below 1, or the other "
     "lanes get nothing, not 1.5"),
    ("lanes:\n  batch:\n    minimum_share: 1\n",
     "batching.yaml:3: lanes.batch.minimum_share: must be at least 0 and below 1, or the other "
     "lanes get nothing, not 1"),
    ("lanes:\n  a: {minimum_share: 0.6}\n  b: {minimum_share: 0.6}\n",
     "batching.yaml:2: lanes: the minimum shares add up to more than 1"),
    ("lanes:\n  batch:\n    max_slowdown: 1\n",
     "batching.yaml:3: lanes.batch.max_slowdown: must be over 1, not 1"),
    ("lanes:\n  batch:\n    itl_target_ms: -3\n",
     "batching.yaml:3: lanes.batch.itl_target_ms: must be milliseconds, over 0, not -3"),
    ("lanes: [batch]\n", "batching.yaml:1: lanes: must be a mapping of keys to values"),
    ("lanes:\n  batch: 7\n", "batching.yaml:2: lanes.batch: must be a mapping of keys to values"),
    ("\nstrategy: continous\n",
     "batching.yaml:2: strategy: must be one of continuous, static, dynamic, not 'continous'"),
    ("strategy:\n  name: static\n  bucket_edges: [4]\n",
     "batching.yaml:3: strategy.bucket_edges: not a parameter of static batching"),
    ("strategy:\n  name: dynamic\n  bucket_edges: [8, 4]\n",
     "batching.yaml:3: strategy.bucket_edges: must be in ascending order, not [8, 4]"),
    ("strategy:\n  name: dynamic\n  window_s: soon\n",
     "batching.yaml:3: strategy.window_s: must be seconds, at least 0, not 'soon'"),
    ("strategy:\n  name: static\n  padded: 1\n",
     "batching.yaml:3: strategy.padded: must be true or false, not 1"),
    ("token_budget: 2e3\n", "batching.yaml:1: token_budget: must be an integer of at least 1, "
     "not '2e3'"),
    ("max_num_seqs: true\n",
     "batching.yaml:1: max_num_seqs: must be an integer of at least 1, not True"),
    ("kv_high_water: 0\n", "batching.yaml:1: kv_high_water: must be over 0 and at most 1, not 0"),
    ("kv_high_water: .nan\n",
     "batching.yaml:1: kv_high_water: must be over 0 and at most 1, not nan"),
    ("max_num_sequences: 4\n",
     "batching.yaml:1: max_num_sequences: unknown key; did you mean max_num_seqs?"),
    ("max_num_seqs: 4\nmax_num_seqs: 5\n", "batching.yaml:2: max_num_seqs: duplicate key"),
    ("- a\n", "batching.yaml:1: must be a mapping of keys to values"),
    ("a: [1\nb: 2\n", "batching.yaml:2: not YAML: expected ',' or ']', but got ':'"),
    ("a: 1\n--- \nb: 2\n", "batching.yaml:2: not YAML: but found another document"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_errors_name_file_line_and_key(text: str, message: str) -> None:
    """Each is one sentence that also says what is allowed."""
    with pytest.raises(ConfigurationError) as caught:
        parse(text)

    assert str(caught.value) == message


def test_an_error_for_an_unknown_key_lists_known_keys() -> None:
    """All keys allowed at that place, in order."""
    with pytest.raises(
        ConfigurationError, match=r":1: zzz: unknown key; known are kv_high_water, "
    ):
        parse("zzz: 1\n")


def test_all_errors_are_reported_together() -> None:
    """So that an operator can correct them all at once."""
    with pytest.raises(ConfigurationError) as caught:
        parse("token_budget: 0\nlanes:\n  batch:\n    priority: high\nunheard_of: 1\n", "my.yaml")

    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["my.yaml:1", "my.yaml:4", "my.yaml:5"]


def test_the_version_depends_on_the_values_alone() -> None:
    """Comments and order do not change it. Twelve hexadecimal digits."""
    version = parse("max_num_seqs: 4\ntoken_budget: 100\n").version

    assert parse("# hello\ntoken_budget: 100\n\nmax_num_seqs:   4").version == version
    assert parse("max_num_seqs: 5\ntoken_budget: 100\n").version != version
    assert len(version) == 12
    assert int(version, 16) >= 0


def test_an_empty_file_changes_nothing() -> None:
    """It still has a version, which shows that it was read."""
    config = parse("# nothing yet\n")

    assert config.apply(EngineOptions(model_path="m")) == EngineOptions(
        model_path="m", batching_version=config.version
    )


def test_the_file_is_found_beside_the_model(tmp_path: Path) -> None:
    """A model's folder may contain a file. An id of the Hub has no folder, so no file."""
    assert find("owner/model") is None
    assert find(str(tmp_path)) is None

    (tmp_path / "batching.yaml").write_text("max_num_seqs: 3\n")

    found = find(str(tmp_path))
    assert found is not None
    assert load(found).values == {"max_num_seqs": 3}


def test_a_missing_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """For example, after a typing error in --batching."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(tmp_path / "batchin.yaml")


def test_yaml_tags_build_no_objects() -> None:
    """The safe loader is used: a file contains values, never code."""
    with pytest.raises(ConfigurationError, match=r"batching\.yaml:1: not YAML"):
        parse("token_budget: !!python/object/apply:os.getcwd []\n")
