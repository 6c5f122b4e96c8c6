"""
A provider that is not one: it speaks `chat_completions`, answers deterministically, misbehaves on request and keeps a
ledger of everything that was dispatched to it.

Demo, tests and benchmarks run against it. Its ledger is the only witness outside the gateway: without it, "at most five
at a time" and "dispatched once" would be claims that the gateway makes about itself.
"""
