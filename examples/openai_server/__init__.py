"""An OpenAI-compatible server whose prompts are computed in one process and whose answers in another.

    python examples/openai_server serve --prefill 2 --decode 2

Its workers are those of `disaggregated`, and these are the modules to read first: `disaggregated.prefill` offers blocks
and keeps them until they were read, `disaggregated.decode` loads them. The rest is what any service has in some form:

    worker       a worker over HTTP: engine, runtime, background tasks, /health
    router       picks two workers for each attempt, and asks them over HTTP
    attempts     an answer by attempts, each with other workers, all under one deadline
    front        the HTTP application that clients talk to
    parameters   what clients may ask for
    replies      what clients get, in OpenAI's shapes
    answer_text  the text of an answer as its tokens come, and stop strings
    failures     what clients are told of a failure, and whether another worker may help; pure
    http_io      limits of bodies, work that ends with its client, uvicorn
    metrics      what /metrics shows
    processes    `serve`: all processes, started again when they die
    load_test    fifty clients, and a worker that is killed in the middle
    command      the command line
"""
