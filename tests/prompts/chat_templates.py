"""Chat templates of the kinds that published policies have, shortened."""

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TURNS + OPEN
"""Qwen2.5: no thinking."""
QWEN3 = (
    "{%- if tools %}<tools>{% endif %}"
    + TURNS
    + "{% set kept = '</think>' %}"
    + OPEN
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
R1_DISTILL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<Assistant>{{ m.content.split('</think>')[-1] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"
)
LLAMA3 = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today {{ date_string }}\n{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GPT_OSS = (
    "Reasoning: {{ reasoning_effort | default('medium') }}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{# <|channel|>analysis<|message|> #}<|start|>assistant"
)
MAGISTRAL = TURNS + "{% generation %}{{ '' if true else '[THINK]' }}{% endgeneration %}" + OPEN
MISTRAL = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Has no generation prompt: the assistant's turn follows the user's at once."""
IGNORING = TURNS
"""Ignores the generation prompt."""
