"""The experiment of how soon a plugin must register: how it is written down."""

from gateway_lab.node.registertime import Row, table


def test_a_row_for_each_kubelet_and_load_a_column_for_each_delay() -> None:
    rows = [
        Row("1.32", "idle", 60, [61.0, 62.0], [0, 0]),
        Row("1.32", "idle", 160, [161.0, 162.0], [10_040, 0]),
        Row("1.32", "busy", 160, [161.0, 170.0], [10_040, 10_360]),
    ]
    assert table(rows).splitlines() == [
        "| kubelet | machine | Register 60 ms after the socket | Register 160 ms after the socket |",
        "| --- | --- | --- | --- |",
        "| 1.32 | idle | 0 of 2 (answered after 61 to 62 ms) | 1 of 2, for 10.0 s (answered after 161 to 162 ms) |",
        "| 1.32 | busy | - | 2 of 2, for 10.0 to 10.4 s (answered after 161 to 170 ms) |",
    ]
