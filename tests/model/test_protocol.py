"""The protocol's small model, explored completely: no bad state, and an end from everywhere."""

import pytest

from tests.model.protocol import ALL_RULES, Bad, Protocol, explore, stuck


def test_every_order_of_events() -> None:
    """Some order of deaths and messages would lose bytes, mix them up, or never end."""
    protocol = Protocol()
    after = explore(protocol)
    print(f"{len(after)} states, {sum(map(len, after.values()))} transitions")
    assert len(after) > 1000
    assert not stuck(after, protocol)


@pytest.mark.parametrize("rule", sorted(ALL_RULES))
def test_every_rule_is_needed(rule: str) -> None:
    """The model would show nothing: it has to find what happens without each of its rules."""
    protocol = Protocol(ALL_RULES - {rule})
    try:
        after = explore(protocol)
    except Bad as bad:
        print(bad)
    else:
        assert stuck(after, protocol), "nothing goes wrong without it"
