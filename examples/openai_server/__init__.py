"""An OpenAI-compatible server whose prompts are computed in one process and whose answers in another.

    python examples/openai_server serve --prefill 2 --decode 2

Its workers are those of `disaggregated`, and these are the modules to read first: `disaggregated.prefill` offers blocks
and keeps them until they were read, `disaggregated.decode` loads them. The rest is what any service has in some form:

    front        the HTTP application that clients talk to
    parameters   what clients may ask for, parameter by parameter
    answer_text  the text of an answer as its tokens come, and stop strings
    shapes       what clients get: OpenAI's HTTP shapes
    dialects     completions and chat: the two ways to write down an answer
    attempts     an answer by attempts: prefill here, decode there; elsewhere if one fails, all under one deadline
    router       the workers as attempts see them, over HTTP
    rotation     which worker is next, which are down, when to look again; pure
    failures     what clients are told of a failure, and whether another worker may help; pure
    worker       one of the workers over HTTP: engine, runtime, background tasks, /health
    responses    HTTP answers that end when their client goes
    metrics      everything that /metrics shows
    http_server  uvicorn, as router and workers run it
    starts       processes that do not start: what they say, how often they are tried
    launcher     all processes of the service, started again when they die
    load_test    fifty clients, and a worker that is killed in the middle; `workload` is what they ask
    command      the command line
"""
