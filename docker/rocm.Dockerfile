# AORTA on ROCm: torch and rocprofv3 of AMD's image, everything else by set-up. docs/gpu.md says how to build and run.
#   docker build -f docker/rocm.Dockerfile -t aorta:rocm .
# Not built yet.
ARG ROCM=7.14.1
ARG UBUNTU=24.04
ARG PYTHON=3.12
ARG TORCH=2.11.0
FROM rocm/pytorch:rocm${ROCM}_ubuntu${UBUNTU}_py${PYTHON}_pytorch_release_${TORCH}

# For the compiled part of the instrument: a compiler and Python's headers. Versions are those of the image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# ROCm's programs lie here where they are not in the image's own environment; without rocprofv3 the build ends.
ENV PATH=$PATH:/opt/rocm/bin
RUN rocprofv3 --version

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
    && .venv/bin/python -c "import torch; assert torch.version.hip, torch.__version__"
ENV PATH=/opt/aorta/.venv/bin:$PATH
CMD ["aorta", "check-gpu"]
