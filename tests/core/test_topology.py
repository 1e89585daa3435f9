import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.topology import ELSEWHERE, ROOT, Spread, Topology
from bftrainer.errors import InputError

CONF = """\
# Two pods and an island
SwitchName=s0 Nodes=tux[0-3]
SwitchName=s1 Nodes=tux[4-7] LinkSpeed=100   # a comment
switchname = s2  NODES="tux[8-9],fox1"

SWITCHNAME=pod0 \\
    Switches=s[0-1]
SwitchName=pod1 Switches=s2
SwitchName=top Switches=pod0,pod1
SwitchName=island Nodes=sea[1-2]
"""


@pytest.fixture
def tree() -> Topology:
    return Topology.from_slurm(CONF)


def test_each_node_has_the_leaf_switch_that_the_file_puts_it_below(tree: Topology) -> None:
    names = [tree.names[tree.leaf(node)] for node in ("tux0", "tux3", "tux7", "fox1", "sea2")]
    assert names == ["s0", "s0", "s1", "s2", "island"]
    assert tree.leaves_of(["tux0", "tux3"]) == [tree.leaf("tux0")] * 2


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("tux0", "tux0", 0),
        ("tux0", "tux3", 1),
        ("tux0", "tux4", 2),
        ("tux0", "fox1", 3),
        ("tux0", "sea1", 4),
        ("tux0", "stranger", 4),
        ("stranger", "stranger", 0),
        ("stranger", "other stranger", 1),
    ],
)
def test_the_distance_of_two_nodes_is_the_height_of_what_joins_them(
    tree: Topology, a: str, b: str, distance: int
) -> None:
    assert tree.distance(a, b) == tree.distance(b, a) == distance


def test_the_spread_of_nodes_is_their_leaf_switches_and_the_height_of_their_subtree(tree: Topology) -> None:
    assert tree.spread([]) == Spread(0, 0)
    assert tree.spread(["tux1"]) == Spread(1, 0)
    assert tree.spread(["tux0", "tux1", "tux2"]) == Spread(1, 1)
    assert tree.spread(["tux0", "tux1", "tux5"]) == Spread(2, 2)
    assert tree.spread(["tux0", "tux5", "tux8"]) == Spread(3, 3)
    assert tree.spread(["tux0", "sea1"]) == Spread(2, 4)


def test_fewer_leaf_switches_count_before_a_lower_subtree() -> None:
    assert Spread(1, 1) < Spread(2, 2) < Spread(2, 3) < Spread(3, 2)


def test_a_node_nobody_named_stands_elsewhere(tree: Topology) -> None:
    assert tree.leaf("stranger") == ELSEWHERE
    assert tree.paths[ELSEWHERE] == (ELSEWHERE, ROOT)


def test_there_is_no_common_switch_of_nothing(tree: Topology) -> None:
    with pytest.raises(ValueError, match="no switches"):
        tree.common([])


def test_an_empty_file_is_a_machine_of_one_leaf_switch() -> None:
    assert Topology.from_slurm("# nothing yet\n").distance("a", "b") == 1


def test_a_switch_may_be_named_before_the_switches_below_it() -> None:
    tree = Topology.from_slurm("SwitchName=top Switches=a,b\nSwitchName=a Nodes=n1\nSwitchName=b Nodes=n2")
    assert tree.distance("n1", "n2") == 2


def test_a_line_continues_over_many_lines_to_the_end_of_the_file() -> None:
    tree = Topology.from_slurm("\ufeffSwitchName=a \\\nLinkSpeed=1 \\\nNodes=n[1-2] \\")
    assert tree.names[tree.leaf("n2")] == "a"


def test_a_comment_that_ends_in_a_backslash_goes_no_further() -> None:
    tree = Topology.from_slurm("# old: \\\nSwitchName=a Nodes=n1")
    assert tree.names[tree.leaf("n1")] == "a"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SwitchName=a Nodes=n1\nrubbish", ":2: must be `Key=value …`, but got 'rubbish'"),
        ("SwitchName=a Nodes=", ":1: must be `Key=value …`, but got 'Nodes='"),
        ('SwitchName=a Nodes="n1', ":1: must be `Key=value …`"),
        ("BlockName=b1 Nodes=n1", ":1: key must be SwitchName, Nodes, Switches or LinkSpeed, but got 'BlockName'"),
        ("Nodes=n1", ":1: must begin with SwitchName=…"),
        ('SwitchName="" Nodes=n1', ":1: must begin with SwitchName=…"),
        ("SwitchName=a", ":1: switch 'a' must have either Nodes=… or Switches=…"),
        ("SwitchName=a Nodes=n1 Switches=b", ":1: switch 'a' must have either"),
        ("SwitchName=a Nodes=n1 nodes=n2", ":1: nodes is given twice"),
        ("SwitchName=a Nodes=n[1-", ":1: brackets do not match"),
        ('SwitchName=a Nodes=""', ":1: not a "),
        ("\n\nSwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", ":4: switch 'a' is named twice, first in line 3"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1", ":2: node 'n1' is below 'a' already, now below 'b'"),
        ("SwitchName=a \\\n Switches=b", ":1: switch 'b' below 'a' is not in the file"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=b Switches=a\nSwitchName=c Switches=a",
            ":3: switch 'a' is below 'b' already, now below 'c'",
        ),
        ("SwitchName=a Switches=a", ":1: switch 'a' is below itself"),
        ("SwitchName=x Nodes=n1\nSwitchName=a Switches=b,x\nSwitchName=b Switches=a", ":[23]: switch '[ab]' is below"),
    ],
)
def test_a_file_that_makes_no_tree_is_refused_with_the_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=f"^topology.conf{words}"):
        Topology.from_slurm(text)


def test_messages_name_the_file_that_was_read() -> None:
    with pytest.raises(InputError, match="^/etc/slurm/topology.conf:1: "):
        Topology.from_slurm("rubbish", "/etc/slurm/topology.conf")


LINES = st.lists(
    st.tuples(*[st.sampled_from("abcd")] * 2, st.sampled_from(["Nodes", "Switches", "\\\nNodes"])), max_size=6
)


@given(LINES)
def test_any_file_either_makes_a_tree_or_is_refused(lines: list[tuple[str, str, str]]) -> None:
    try:
        tree = Topology.from_slurm("\n".join(f"SwitchName={a} {key}={b}" for a, b, key in lines))
    except InputError:
        return
    assert all(path[-1] == ROOT for path in tree.paths)


def test_a_pattern_groups_nodes_by_rack() -> None:
    tree = Topology.from_pattern(["c05n06", "c05n07", "c06n06"], r"([a-h]\d\d)n\d\d")
    assert tree.names[tree.leaf("c05n06")] == "c05"
    assert tree.distance("c05n06", "c05n07") == 1
    assert tree.distance("c05n06", "c06n06") == 2


def test_a_pattern_of_two_groups_has_two_levels_coarse_first() -> None:
    tree = Topology.from_pattern(["c05n06", "c06n06", "d05n06"], r"([a-h])(\d\d)n\d\d")
    assert tree.names[tree.leaf("d05n06")] == "d/05"
    assert tree.distance("c05n06", "c06n06") == 2
    assert tree.distance("c05n06", "d05n06") == 3
    assert tree.leaf("c05n06") != tree.leaf("d05n06")


def test_a_node_that_only_begins_like_the_pattern_stands_elsewhere() -> None:
    tree = Topology.from_pattern(["c05n06", "c05n06-old", "login1"], r"([a-h]\d\d)n\d\d")
    assert tree.leaf("c05n06-old") == tree.leaf("login1") == ELSEWHERE


def test_a_group_that_takes_no_part_is_a_level_without_a_name() -> None:
    tree = Topology.from_pattern(["r1n1", "n2"], r"(r\d)?n\d")
    assert tree.leaf("n2") not in (ELSEWHERE, tree.leaf("r1n1"))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("(", "missing \\)"), (r"n\d+", "must have a group"), (r"(x)n\d+", "matches none \\('n1'\\)")],
)
def test_a_pattern_that_groups_nothing_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(InputError, match=f"topology pattern .*{words}"):
        Topology.from_pattern(["n1", "n2"], pattern)


NAMES = st.lists(
    st.tuples(*[st.integers(0, 2)] * 3, st.integers(0, 4)).map(lambda t: "{}-{}-{}-{}".format(*t)), min_size=1
)


@given(NAMES)
def test_distances_follow_the_names_and_the_spread_is_the_largest_of_them(nodes: list[str]) -> None:
    tree = Topology.from_pattern(nodes, r"(\d)-(\d)-(\d)-\d")
    largest = 0
    for a in nodes:
        for b in nodes:
            shared = next((i for i, (x, y) in enumerate(zip(a.split("-"), b.split("-"), strict=True)) if x != y), 4)
            assert tree.distance(a, b) == 4 - shared
            largest = max(largest, 4 - shared)
    assert tree.spread(nodes) == Spread(len({node[:5] for node in nodes}), largest)


@given(NAMES)
def test_heights_grow_toward_the_root_and_parents_come_first(nodes: list[str]) -> None:
    tree = Topology.from_pattern(nodes, r"(\d)-(\d)-(\d)-\d")
    for switch, path in enumerate(tree.paths):
        assert path[0] == switch
        assert path[-1] == ROOT
        assert list(path) == sorted(path, reverse=True)
        heights = [tree.heights[s] for s in path]
        assert heights == sorted(set(heights))
