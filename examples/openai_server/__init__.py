"""An OpenAI-compatible server whose prompts are computed in one process and whose answers in another.

    python examples/openai_server serve --prefill 2 --decode 2

kvflow is used in two modules, and these are the ones to read first: `prefill` offers blocks and keeps them until they
were read, `decode` loads them. The rest is what any such service has in some form:

    front        the HTTP application that clients talk to
    parameters   what clients may ask for, parameter by parameter
    answer_text  the text of an answer as its tokens come, and stop strings
    shapes       what clients get: OpenAI's HTTP shapes
    dialects     completions and chat: the two ways to write down an answer
    attempts     an answer by attempts: prefill here, decode there; elsewhere if one fails, all under one deadline
    router       the workers as attempts see them, over HTTP
    rotation     which worker is next, which are down, when to look again; pure
    messages     what router and workers say to each other
    failures     what may go wrong, whose fault it is, whether another worker may help; pure
    worker       what both kinds of workers have: engine, runtime, background tasks, /health
    neighbours   prefixes that prefill workers load from each other (`--share-prefixes`)
    responses    HTTP answers that end when their client goes
    metrics      everything that /metrics shows
    http_server  uvicorn, as router and workers run it
    starts       processes that do not start: what they say, how often they are tried
    launcher     all processes of the service, started again when they die
    load_test    fifty clients, and a worker that is killed in the middle; `workload` is what they ask
    command      the command line
"""
