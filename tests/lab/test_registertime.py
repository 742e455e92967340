"""The experiment of how soon a plugin must register: how it is written down."""

from gateway_lab.node.registertime import Row, table


def test_kubelets_of_which_the_same_was_seen_share_a_row() -> None:
    rows = [
        Row("1.32", "idle", 60, [61.0, 62.0], [0, 0]),
        Row("1.32", "idle", 160, [161.0, 162.0], [10_040, 0]),
        Row("1.32", "busy", 160, [161.0, 170.0], [10_040, 10_360]),
        Row("1.37", "busy", 160, [161.0, 170.0], [10_040, 10_360]),
    ]
    assert table(rows).splitlines() == [
        "| kubelet | machine | Register 60 ms after the socket | Register 160 ms after the socket |",
        "| --- | --- | --- | --- |",
        "| 1.32 | idle | 0 of 2 | 1 of 2, for 10.0 s |",
        "| 1.32, 1.37 | busy | - | 2 of 2, for 10.0-10.4 s |",
    ]
