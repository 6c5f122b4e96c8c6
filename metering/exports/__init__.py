"""
What a provider's own books say: its exported usage and cost, read into one form.

Reconciliation is worth nothing if a row is misread or left out, so a reader here either understands a row or refuses
the file by name, line and column; what is not the gateway's kind of work is kept, with the reason. Each form is known
by its content, never by a file's name.
"""
