"""An OpenAI-compatible server: one process computes a prompt, another generates the answer.

    python examples/openai_server serve --prefill 2 --decode 2

It shows an engine behind FastAPI with what a service needs: prompts that are read while they are computed, another
attempt with other workers if one fails, one deadline for all of it, blocks that are freed when a client hangs up, an
orderly end, and kvflow's metrics beside the engine's.

The workers are those of `disaggregated`. Read their modules first: `disaggregated.prefill` offers blocks and keeps them
until they have been read, `disaggregated.decode` loads them. The rest are parts that any service has:

    worker       a worker over HTTP: engine, runtime, background tasks, /health
    router       picks two workers for each attempt, and asks them over HTTP
    attempts     an answer by up to three attempts with different workers, under one deadline
    front        the HTTP application for clients
    parameters   the parameters of requests
    replies      replies in OpenAI's format
    answer_text  the text of a growing answer, and stop strings
    failures     the HTTP error for each kind of failure, and whether another attempt may help; pure
    http_io      limit of request bodies, cancellation when a client disconnects, uvicorn
    metrics      the metrics at /metrics
    serve        all processes on one machine, for a demo
    command      the command line
"""
