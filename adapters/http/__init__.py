"""
HTTP/1.1 as far as a gateway needs it of its providers: a connection, a request on it, its answer, the connection again.

A general client does much more for each request than a gateway has a use for, and takes several times the CPU for it.
Here the parser is `httptools` (llhttp), and what is around it is what `adapters.client` promises: whether a byte of a
request was written, whether an answer ended by its framing, and whose time passes.

    request     a URL and its header fields to an origin and the bytes of a head; made once and kept
    addresses   names to addresses, kept for seconds
    pool        connections, made and kept, for each origin
    connection  one socket and its parser, and the answer that comes on it
    coding      compressed bodies, bounded as they unfold
    clock       the deadline, and a budget that is spent only while the provider is awaited
"""
