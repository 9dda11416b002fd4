"""The bilevel problem, the structure of its lower loss, and its constant parts."""
