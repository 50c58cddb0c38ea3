# AORTA on CUDA: torch of the official image, everything else by set-up. docs/gpu.md says how to build and run.
#   docker build -f docker/cuda.Dockerfile -t aorta:cuda .
# Not built yet.
ARG TORCH=2.11.0
ARG CUDA=12.8
ARG CUDNN=9
FROM pytorch/pytorch:${TORCH}-cuda${CUDA}-cudnn${CUDNN}-runtime

# For the compiled part of the instrument: a compiler and Python's headers. Versions are those of the image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The owner of what runs leave in mounted folders; --non-unique, for images have a user 1000 already.
ARG USER_ID=1000
RUN useradd --non-unique --uid ${USER_ID} --create-home --shell /bin/bash aorta \
    && mkdir /opt/aorta && chown aorta /opt/aorta
# By name, whose home then is the one made above.
# hadolint ignore=DL3066
USER aorta
WORKDIR /opt/aorta
COPY --chown=aorta . .

# Set-up uses the image's torch and never replaces it; the second line holds it to that.
RUN bash scripts/setup.sh \
    && .venv/bin/python -c "import torch; assert torch.version.cuda, torch.__version__" \
    && .venv/bin/python -m pip install --no-cache-dir nvidia-ml-py
ENV PATH=/opt/aorta/.venv/bin:$PATH
CMD ["aorta", "check-gpu"]
