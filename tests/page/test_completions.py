"""What the reader of the page shows: groups by step, tokens with their facts, texts that do no harm."""

from dataclasses import replace

import pytest
from journals import write_journal
from page_runs import HOSTILE, add_step, episode_group, made_group, write_decisions, write_page_run
from refusals import refused

from megatron_scalerl.page.completions import Reader, token_texts
from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.page.run_data import RunData
from megatron_scalerl.rollouts.history import BatchRecord, read_history
from megatron_scalerl.rollouts.retention import remove
from megatron_scalerl.rollouts.token_scores import CompletionScores, write_scores


def opened(run):
    index = GroupIndex(run)
    index.update()
    return index, Reader(run, RunData(run).recipe, index)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_page_run(tmp_path_factory.mktemp("reader") / "run")


@pytest.fixture(scope="module")
def reader(run):
    return opened(run)[1]


def test_the_index_follows_the_journal(tmp_path):
    run = write_page_run(tmp_path / "run")
    index, reader = opened(run)
    assert not index.update()
    write_journal(run, groups=[made_group(6)])
    assert not index.update() and reader.group(6)["step"] is None
    assert reader.group(6)["completions"][0]["untrained"] == "the group is in no batch yet"
    write_journal(run, batches=[BatchRecord(batch=3, step=4, policy_version=3, group_ids=(6,))])
    assert index.update() and index.steps[-1] == 4
    assert reader.group(6)["completions"][0]["untrained"] == "the run has no record of the group's batch"
    write_decisions(run, 3, [made_group(6)[0]])
    assert reader.group(6)["step"] == 4 and reader.group(6)["completions"][0]["advantage"] == 1.0


def test_a_group_says_how_it_was_trained(reader):
    group = reader.group(0)
    assert (group["step"], group["policy_version"], group["pass_rate"], group["prompt"]) == (1, 0, 0.5, "a=")
    right, wrong = group["completions"]
    assert (right["text"], right["correct"], right["advantage"]) == ("a therefore=4", True, 1.0)
    assert (wrong["reason"], wrong["advantage"], wrong["sampled"], wrong["tokens"]) == ("no_answer", -1.0, 1, 3)
    assert wrong["versions"] == [0, 1] and wrong["logprob"] == -2.0
    assert "text" not in reader.group(0, texts=False)["completions"][0]


def test_groups_that_retention_has_deleted(tmp_path):
    run = write_page_run(tmp_path / "run")
    add_step(run, 6, 7, segment_bytes=1)
    finished = read_history(run).finished
    remove(run / "rollouts", {finished[group_id].segment for group_id in (0, 7)})
    write_decisions(run, 3, [made_group(number)[0] for number in (6, 7)])
    index, reader = opened(run)
    assert index.chosen(24) == [6]
    assert reader.group(6)["completions"][0]["advantage"] == 1.0
    for group_id in (0, 7):
        with refused(f"group {group_id} is deleted; checkpoint.rollouts: keep keeps all"):
            reader.group(group_id)


def test_filtered_groups_have_no_advantage(tmp_path):
    run = write_page_run(tmp_path / "run")
    group, rollouts = made_group(6)
    equal = replace(group, scores=(group.scores[0],) * 2)
    add_step(run, (equal, rollouts))
    write_decisions(run, 3, [equal])
    _, reader = opened(run)
    first = reader.group(6)["completions"][0]
    assert first["advantage"] is None
    assert first["untrained"] == "the algorithm left its group out of the batch: all_correct"


def test_a_completion_token_by_token(reader):
    found = reader.completion(0, 1)
    assert found["pieces"] == ["b", "=", "4"] and found["logprobs"] == [-2.0, 0.0, 0.0]
    assert found["spans"] == [(0, 0, ""), (1, 1, "forced")] and found["ids"] == [1, 3, 4]


def test_control_and_bidi_characters_are_made_visible(reader):
    found = reader.completion(1, 0)["pieces"]
    assert found[0] == HOSTILE[0]  # the page writes it as text
    assert found[2] == "\\x1b]0;title\\x07\\x1b[2J" and found[3] == "\\u202eright to left\\u2066"
    assert reader.group(1)["answer"] == "</script>4\\x1b"


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """A reader of group 6 of a fourth step: an episode that forked, one that did not, and a single turn."""
    run = add_step(write_page_run(tmp_path_factory.mktemp("episodes") / "run"), episode_group())
    write_decisions(run, 3, [episode_group()[0]])
    sizes = {0: 2, 1: 4, 2: 6}
    rows = [
        CompletionScores(
            group_id=6, position=n, policy_version=3, logprobs=[-1.0 - n] * size, entropies=[0.5 + n] * size
        )
        for n, size in sizes.items()
    ]
    write_scores(run, 4, rows)
    return opened(run)[1]


def test_what_an_environment_wrote_is_marked_and_made_visible(episodes):
    found = episodes.completion(6, 1)
    assert found["spans"] == [(0, 0, ""), (1, 0, "forced"), (2, 0, "environment"), (8, 1, "")]
    assert found["pieces"][2:8] == episodes.completion(1, 0)["pieces"][:6]
    assert found["pieces"][4] == "\\x1b]0;title\\x07\\x1b[2J" and found["parts"] == [0]
    assert (found["mismatch"], found["entropies"]) == (None, None)


def test_a_forked_episode_is_read_part_after_part(episodes):
    found = episodes.completion(6, 0)
    assert found["parts"] == [0, 2, 6] and found["ids"] == [0, 3, 7, 8, 1, 4, 5, 6, 7, 8, 2, 4]
    assert found["spans"] == [
        (0, 0, ""),
        (2, 0, "environment"),
        (4, 0, ""),
        (6, 1, "environment"),
        (10, 1, ""),
    ]
    assert found["mismatch"][:3] == [-0.5, -0.5, -2.0] and found["mismatch"][10] == -2.5
    assert found["entropies"] == [0.5] * 2 + [1.5] * 4 + [2.5] * 6
    with refused("group 6 has no completion 3; the last is 2"):
        episodes.completion(6, 3)


def test_a_group_counts_the_turns_of_its_episodes(episodes):
    group = episodes.group(6)
    forked, whole, single = group["completions"]
    columns = ("tokens", "sampled", "turns", "environment_tokens")
    assert [forked[name] for name in columns] == [12, 6, 3, 6]
    assert [whole[name] for name in columns] == [10, 3, 2, 6]
    assert [single[name] for name in columns] == [2, 2, 1, 0]
    assert [each["scored"] for each in (forked, whole, single)] == [True, False, False]
    assert [each["advantage"] for each in (forked, whole, single)] == [1.4142, -0.7071, -0.7071]
    assert group["pass_rate"] == pytest.approx(1 / 3)


def test_scores_of_a_part_that_is_missing_are_named(tmp_path):
    run = add_step(write_page_run(tmp_path / "run"), episode_group())
    write_scores(
        run, 4, [CompletionScores(group_id=6, position=1, policy_version=3, logprobs=[-1.0] * 4, entropies=[0.5] * 4)]
    )
    _, reader = opened(run)
    with refused("group 6: completion 0 has 12 tokens, and 4 scores"):
        reader.completion(6, 0)


@pytest.mark.parametrize(
    "group_id, position, said",
    [(99, 0, "journal.jsonl: the run has no finished group 99"), (0, 2, "group 0 has no completion 2")],
)
def test_what_is_not_there_is_named(reader, group_id, position, said):
    with refused(said):
        reader.completion(group_id, position)


def test_a_damaged_block_is_named(tmp_path):
    run = write_page_run(tmp_path / "run")
    segment = run / "rollouts/segment-00000.bin"
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    _, reader = opened(run)
    with refused(r"segment-00000.bin: byte \d+: .* checksum"):
        reader.group(5)


def test_chosen_groups_are_spread_over_the_run(run):
    index, _ = opened(run)
    assert index.chosen(2) == [0, 4] and index.chosen(4) == [0, 1, 2, 4] and index.chosen(0) == []
    assert sorted(index.chosen(100)) == list(range(6))


class ByteTokenizer:
    """Stands in for a tokenizer whose tokens are bytes."""

    def decode(self, ids, **_):
        return bytes(ids).decode("utf8", "replace")


def test_a_character_of_several_tokens_is_the_text_of_its_last():
    data = "aé€😀b".encode()
    texts = token_texts(ByteTokenizer(), list(data))
    assert texts == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]
    assert token_texts(ByteTokenizer(), [0xFF] * 5 + [0x61])[-1].endswith("a")
    assert token_texts(ByteTokenizer(), list(data[:2])) == ["a", "\ufffd"]  # cut within a character
