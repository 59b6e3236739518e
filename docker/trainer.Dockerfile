# A trainer, as an example: what your own image needs is the package with its extra [torch], and the
# group of the daemon. From the top of the clone:
#   docker build -f docker/trainer.Dockerfile -t discod-trainer .
ARG DEBIAN=bookworm-slim

FROM debian:${DEBIAN}
# Whatever Debian's release has now, with its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY discod discod
COPY client client
# Plain pip takes torch's CUDA build. For the CPU build give PyTorch's CPU index as this argument.
ARG PIP_EXTRA_INDEX_URL
RUN python3 -m venv /opt/trainer \
    && /opt/trainer/bin/pip install --no-cache-dir '.[torch]'
COPY docker/train.py /opt/trainer/train.py
RUN groupadd --gid 10001 discod \
    && useradd --uid 10002 --user-group --groups discod --create-home trainer
ENV PATH=/opt/trainer/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
USER 10002
WORKDIR /home/trainer
ENTRYPOINT ["python", "/opt/trainer/train.py"]
