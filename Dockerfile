# docker build -t cmexam_tune .                                        a CPU image: evaluation, API models, tiny models
# docker build -t cmexam_tune:cu126 --build-arg TORCH=cu126 .          NVIDIA cards from V100 on (CUDA 12.6)
# docker run --gpus all -v $PWD/data:/work/data -v $PWD/runs:/work/runs -v /models:/models cmexam_tune:cu126 \
#   cmexam-tune train --config lora_llama.yaml model.model_name_or_path=/models/llama-7b
FROM python:3.11-slim
ARG TORCH=cpu
RUN apt-get update && apt-get install -y --no-install-recommends build-essential make numactl && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY . /opt/cmexam_tune
# PyTorch first, by the card: the wheels of pip's default index are built for cards newer than V100.
RUN pip install --no-cache-dir "$(grep ^torch== /opt/cmexam_tune/constraints.txt)" \
    --index-url https://download.pytorch.org/whl/${TORCH}
RUN pip install --no-cache-dir -c /opt/cmexam_tune/constraints.txt "/opt/cmexam_tune[serve,endpoint]"
CMD ["cmexam-tune", "--help"]
