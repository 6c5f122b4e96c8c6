# syntax=docker/dockerfile:1

# ---- build: a virtual environment with exactly what requirements.txt names, by hash
FROM python:3.13-slim AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1
RUN python -m venv /opt/tollbridge
ENV PATH=/opt/tollbridge/bin:$PATH

# The dependencies change seldom, the code often: two layers.
COPY requirements.txt /src/
RUN pip install --require-hashes -r /src/requirements.txt

COPY pyproject.toml README.md /src/
COPY gateway /src/gateway
COPY adapters /src/adapters
COPY admission /src/admission
COPY metering /src/metering
COPY protos /src/protos
RUN pip install --no-deps --no-build-isolation /src

# ---- runtime: the same interpreter, that environment, and no build tools
FROM python:3.13-slim

RUN useradd --system --uid 10001 --home-dir /var/lib/tollbridge --shell /usr/sbin/nologin tollbridge \
    && install -d -o tollbridge -g tollbridge -m 0700 /var/lib/tollbridge

COPY --from=build /opt/tollbridge /opt/tollbridge

ENV PATH=/opt/tollbridge/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOLLBRIDGE_DATA_DIR=/var/lib/tollbridge \
    TOLLBRIDGE_REST_LISTEN=0.0.0.0:8080 \
    TOLLBRIDGE_GRPC_LISTEN=0.0.0.0:50051

USER tollbridge
WORKDIR /var/lib/tollbridge
VOLUME /var/lib/tollbridge
EXPOSE 8080 50051

# Alive, not ready: a gateway that waits for its database must not be restarted for it. Load balancers ask /readyz.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; port = os.environ['TOLLBRIDGE_REST_LISTEN'].rpartition(':')[2]; r.urlopen(f'http://127.0.0.1:{port}/healthz', timeout=2)"]

# SIGTERM drains; give it time (docker stop --time, terminationGracePeriodSeconds).
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["serve"]
